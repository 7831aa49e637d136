"""The processes of the service: their handover, counters, files and watchdogs."""
