"""Configuration: the schema of `conf/`, its checks, and the placement of roles and weights."""
