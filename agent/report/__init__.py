"""Run folders, and what is made of them: the report's page and the explanation in words."""
