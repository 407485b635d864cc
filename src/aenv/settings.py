"""Every setting, declared once: type, unit, default and reason.

Values come from, strongest first: command line (the few flags of `aenv server`), environment `AENV_<NAME>`, the TOML
file named by AENV_CONFIG_PATH, the default here. docs/settings.md is generated from this module; a test fails when
they differ.
"""

import os
import tomllib
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from aenv.errors import InvalidRequest


def _default_cache() -> Path:
    if os.geteuid() == 0:
        return Path("/var/cache/aenv")
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "aenv"


def _split(value: object) -> object:
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""In the environment: separated by commas."""


class Settings(BaseSettings):
    """Settings of one node. Making them raises InvalidRequest, which names the setting or the file that is wrong."""

    model_config = SettingsConfigDict(env_prefix="AENV_", extra="ignore", frozen=True)

    # where things are
    home: Path = Field(Path("/var/lib/aenv"), description="Durable state: database, layers, snapshots, secrets.")
    runtime: Path = Field(
        Path("/run/aenv"),
        description="Sockets, mounts and the resource ledger; lost at a reboot, best on a tmpfs.",
    )
    cache: Path = Field(
        default_factory=_default_cache,
        description="Guest kernel, initramfs and base image, keyed by content; shared by nodes, rebuilt at will. "
        "VMMs and blockd, which are not root, must be able to read it.",
    )

    # the front door
    listen: str = Field("127.0.0.1:8000", description="HOST:PORT of the public listener (API and sandbox traffic).")
    domain: str = Field(
        "",
        description="Wildcard domain of sandbox hosts, `{port}-{sandboxID}.{domain}`; empty: routing by headers only.",
    )
    api_key: str = Field(
        "",
        description="The API key, 32-256 of A-Z a-z 0-9 . _ ~ -; empty: generated into <home>/secrets/api-key.",
    )
    max_body_mib: int = Field(
        4, ge=1, description="Largest control-plane request body, MiB. File uploads do not pass here."
    )

    # virtual machines
    vmm: Literal["qemu"] = Field("qemu", description="The virtual machine monitor: qemu.")
    accelerator: Literal["auto", "kvm", "tcg"] = Field(
        "auto", description="auto, kvm or tcg. auto takes KVM only after a self-test ran a guest on it."
    )
    template_vcpus: int = Field(2, ge=1, le=32, description="vCPUs of the built-in template `base`.")
    template_memory_mib: int = Field(1024, ge=128, description="Memory of the built-in template `base`, MiB.")
    template_disk_mib: int = Field(
        8192, ge=1024, description="Root disk of the built-in template `base`, MiB; stored sparsely."
    )
    warm_pool_size: int = Field(
        0,
        ge=0,
        description="Restored, run-in, stopped VMs of `base` kept ready; each costs its dirty memory.",
    )
    boot_timeout_s: float = Field(
        120.0, gt=0, description="Deadline of a first boot, s; emulated and busy hosts need tens of seconds."
    )
    restore_timeout_s: float = Field(60.0, gt=0, description="Deadline of a restore until the guest agent answers, s.")
    freeze_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long user processes may take to freeze before a capture goes on without it and says so, s.",
    )
    uid_base: int = Field(
        2_000_000,
        ge=65536,
        description="blockd runs as this uid, edge as the one before, the VMM of slot n as this + n.",
    )

    # admission
    max_starts_in_flight: int = Field(
        0,
        ge=0,
        description="Starts and resumes at once; 0: twice the CPUs. Simultaneous starts are what kills such systems.",
    )
    start_queue_timeout_s: float = Field(30.0, ge=0, description="How long a start waits for its turn before 429, s.")
    memory_overcommit: float = Field(
        4.0,
        gt=0,
        description="Nominal guest memory admitted, as a multiple of the host's; idle memory returns to the host.",
    )
    min_free_disk_mib: int = Field(
        1024, ge=0, description="Free space in <home> below which no start or capture begins, MiB."
    )

    # time to live
    default_timeout_s: int = Field(300, gt=0, description="Time to live of a sandbox whose request names none, s.")
    default_on_timeout: Literal["pause", "kill"] = Field(
        "pause",
        description="pause or kill, when a request leaves autoPause out. E2B kills; work lost is worse than work kept.",
    )

    # network
    slot_pool_size: int = Field(4, ge=0, description="Network slots kept ready.")
    host_interaction_cidr: str = Field(
        "10.11.0.0/16", description="One address a slot, the only one by which the host reaches a sandbox."
    )
    veth_cidr: str = Field("10.12.0.0/15", description="A /31 a slot between host and the slot's namespace.")
    denied_cidrs: Words = Field(
        ["10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
        description="Never reachable from a sandbox, whatever its policy.",
    )
    dns_servers: Words = Field(
        [], description="Resolvers of sandboxes; empty: the host's own, if any is not on loopback."
    )

    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto, json or console. auto: console on a terminal."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if path := os.environ.get("AENV_CONFIG_PATH"):
            sources.append(InitSettingsSource(settings_cls, _read_file(Path(path), settings_cls.model_fields)))
        return tuple(sources)

    @field_validator("listen")
    @classmethod
    def _names_host_and_port(cls, text: str) -> str:
        host, _, port = text.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"{text!r} is not HOST:PORT")
        return text

    @model_validator(mode="wrap")
    @classmethod
    def _wrong_ones_are_named(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return build(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise InvalidRequest(
                f"setting {name}: {first['msg'].removeprefix('Value error, ')}",
                hint=f"it comes from AENV_{name.upper()}, the file of AENV_CONFIG_PATH, or a flag",
            ) from error

    @property
    def edge_uid(self) -> int:
        return self.uid_base - 1

    @property
    def blockd_uid(self) -> int:
        return self.uid_base

    def vmm_uid(self, slot_index: int) -> int:
        return self.uid_base + slot_index


def _read_file(path: Path, known: Container[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"AENV_CONFIG_PATH: {path}: {reason}") from error
    if unknown := [name for name in values if name not in known]:
        raise InvalidRequest(f"{path}: there is no setting {', '.join(unknown)}", hint="docs/settings.md lists them")
    return values


def reference() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `python -m aenv.settings`. Strongest first: the flags of `aenv server`, the environment, the",
        "TOML file that `AENV_CONFIG_PATH` names (same names, lower case, no prefix), the default. Lists are",
        "separated by commas in the environment.",
        "",
        "| environment | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "`/var/cache/aenv`, or the user's own" if name == "cache" else f"`{_shown(field.default)}`"
        lines.append(f"| `AENV_{name.upper()}` | {default} | {field.description} |")
    return "\n".join([*lines, ""])


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    print(reference(), end="")
