"""The generator, critic, reward and teacher servers, their wire protocol and their clients."""
