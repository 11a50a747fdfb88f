"""Going on after the table changed."""
