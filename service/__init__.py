"""The attnd service: routes, wire, engine, core."""
