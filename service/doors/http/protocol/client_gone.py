"""What ends the answering of a request whose client has left."""


class ClientGone(Exception):
    """The client hung up before its answer was there."""
