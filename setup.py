"""The packages of the distribution; everything else is in pyproject.toml.

The client is `attnd`. The folders service/, kernels/ and config/ become subpackages of
`attnd_service`, because as top-level packages their names would collide with others'.
"""

from setuptools import find_packages, setup

SERVICE = ("service", "kernels", "config")

client = find_packages("client/src")
service = find_packages(".", include=[glob for name in SERVICE for glob in (name, f"{name}.*")])

setup(
    packages=[*client, *(f"attnd_service.{name}" for name in service)],
    package_dir={
        "attnd": "client/src/attnd",
        **{f"attnd_service.{name}": name for name in SERVICE},
    },
    package_data={
        "attnd": ["py.typed"],
        "attnd_service.service": [
            "gateway/*.proto",
            "gateway/*.binpb",
            "doors/http/live/files/*",
            "doors/http/endpoints/docs/*",
        ],
        "attnd_service.kernels": ["cuda/*/*.cu", "cuda/*/*.cuh"],
        "attnd_service.config": ["*.yaml"],
    },
)
