"""Programs that show how Sluice is used. They are not part of the installed package."""
