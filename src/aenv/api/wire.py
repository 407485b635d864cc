"""The objects of E2B's control-plane protocol, as they are on the wire. convert.py says what they mean to the node.

Requests: unknown fields are ignored, absent and null are the same, numbers and strings are taken as they are (no
"300" for 300). A field of the protocol that this server does not act upon yet is `Unsupported`: it may be there, but
must not ask for anything. Answers: a field without a value is left out.
"""

import ipaddress
import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

MAX_TIMEOUT_S = 3_155_760_000
"""100 years; beyond it a deadline is no date."""
MAX_FORKS = 100


def _refuse(value: Any) -> None:
    if value not in (None, False, "", [], {}):
        raise ValueError("is not supported yet")


def _full_memory(value: bool | None) -> None:
    if value is False:
        raise ValueError("file-system-only captures are not supported yet")


def _plain_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode") from None
    if "\0" in text:
        raise ValueError("must not contain NUL")
    return text


def _variable_name(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("is no name of an environment variable")
    return name


def _cidr(text: str) -> str:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is no address or CIDR (domain names are not supported yet)") from None
    if network.version != 4:
        raise ValueError(f"{text!r}: IPv6 is not supported yet")
    return str(network)


Unsupported = Annotated[Any, AfterValidator(_refuse)]
Memory = Annotated[bool | None, Field(strict=True), AfterValidator(_full_memory)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, StringConstraints(strict=True), AfterValidator(_plain_text)]
VariableName = Annotated[Text, AfterValidator(_variable_name)]
Cidr = Annotated[Text, StringConstraints(max_length=64), AfterValidator(_cidr)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=MAX_TIMEOUT_S)]
Reference = Annotated[Text, StringConstraints(min_length=1, max_length=256)]
SnapshotName = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


def _wire_name(field: str) -> str:
    return re.sub(r"(Id|Mb)$", lambda match: match[0].upper(), to_camel(field))


class Wire(BaseModel):
    model_config = ConfigDict(alias_generator=_wire_name, validate_by_name=True, serialize_by_alias=True)


# requests


class AutoResume(Wire):
    enabled: Unsupported = None


class Network(Wire):
    allow_out: list[Cidr] | None = None
    deny_out: list[Cidr] | None = None
    allow_public_traffic: Flag | None = None
    dns_servers: Unsupported = None
    egress_proxy: Unsupported = None
    mask_request_host: Unsupported = None
    https_ports: Unsupported = None
    rules: Unsupported = None


class NewSandboxV2(Wire):
    template_id: Reference
    timeout: Seconds | None = None
    metadata: dict[Text, Text] | None = None
    env_vars: dict[VariableName, Text] | None = None
    allow_internet_access: Flag | None = Field(None, validation_alias="allow_internet_access")
    auto_pause: Flag | None = None
    auto_pause_memory: Memory = None
    auto_resume: AutoResume | None = None
    network: Network | None = None
    mcp: Unsupported = None
    iam: Unsupported = None
    volume_mounts: Unsupported = None


class NewSandbox(NewSandboxV2):
    secure: Flag | None = None


class Connect(Wire):
    timeout: Seconds
    memory: Memory = None


class ConnectV2(Wire):
    timeout: Seconds | None = None
    memory: Memory = None


class Resume(Wire):
    timeout: Seconds | None = None
    auto_pause: Flag | None = None
    memory: Memory = None


class Pause(Wire):
    memory: Memory = None
    require_healthy_guest: Flag | None = None


class Timeout(Wire):
    timeout: Annotated[int, Field(strict=True, ge=0, le=MAX_TIMEOUT_S)]


class Fork(Wire):
    timeout: Seconds | None = None
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_FORKS)] | None = None


class NewSnapshot(Wire):
    name: SnapshotName | None = None
    memory: Memory = None


# answers


class Error(Wire):
    code: int
    message: str


class Sandbox(Wire):
    template_id: str
    sandbox_id: str
    client_id: str = ""
    envd_version: str
    alias: str | None = None
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None


class ListedSandbox(Wire):
    template_id: str
    sandbox_id: str
    client_id: str = ""
    alias: str | None = None
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    metadata: dict[str, str]
    state: Literal["running", "paused"]
    envd_version: str
    envd_unresponsive_at_pause: bool | None = None


class NetworkDetail(Wire):
    allow_out: list[str]
    deny_out: list[str]
    allow_public_traffic: bool


class Lifecycle(Wire):
    on_timeout: Literal["pause", "kill"]
    auto_resume: bool


class SandboxDetail(ListedSandbox):
    envd_access_token: str | None = None
    allow_internet_access: bool
    domain: str | None = None
    network: NetworkDetail
    lifecycle: Lifecycle


class ForkResult(Wire):
    sandbox: Sandbox | None = None
    error: Error | None = None


class Snapshot(Wire):
    snapshot_id: str
    names: list[str]
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    created_at: datetime
    updated_at: datetime
