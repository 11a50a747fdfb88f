"""How a run goes on after its table changed."""
