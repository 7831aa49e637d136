"""The endpoints of the HTTP door: operations, events, pages, and how they respond."""
