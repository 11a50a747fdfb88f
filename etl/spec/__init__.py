"""A feature spec: TOML to frozen values."""
