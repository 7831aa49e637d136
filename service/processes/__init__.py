"""The processes of the service: what they are handed, their counters, files and watchdogs."""
