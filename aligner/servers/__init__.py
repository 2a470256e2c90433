"""The critic and reward servers, their wire protocol and their client."""
