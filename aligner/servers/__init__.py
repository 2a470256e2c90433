"""The generator, critic and reward servers, their wire protocol and their clients."""
