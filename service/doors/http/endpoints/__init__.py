"""The endpoints of the HTTP door: operations, inference, events, pages, and how they respond."""
