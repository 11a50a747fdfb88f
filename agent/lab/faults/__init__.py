"""The study of faults: pipelines of slow items, and how soon a policy answers a fault."""
