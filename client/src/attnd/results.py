"""Results of calls, typed, frozen values with numpy arrays: the service's answers."""

from attnd.wire.answers import *  # noqa: F403
