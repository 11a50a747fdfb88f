"""The parts between the controller and the loader in a real run."""
