"""Between the wire's objects and the node's values."""

from aenv.api import wire
from aenv.api.errors import printable, row_of
from aenv.errors import AenvError, NotFound
from aenv.ids import is_sandbox_id
from aenv.network.policy import NetworkPolicy
from aenv.node.views import CreateRequest, OnTimeout, PublicState, SandboxView, SnapshotView
from aenv.settings import Settings

_DEFAULT_TAGS = ("default", "latest")


def sandbox_id(text: str) -> str:
    """An id out of a path; old SDKs append a client's id after a dash.

    Raises: NotFound for what cannot be one.
    """
    head = text.split("-", 1)[0]
    if not is_sandbox_id(head):
        raise NotFound(f"sandbox {printable(text[:64])!r} not found")
    return head


def reference(text: str) -> str:
    """Id or name of a template or snapshot out of `[namespace/]name[:tag]`. There is one namespace and one tag.

    Raises: NotFound for any other tag.
    """
    name, _, tag = text.rpartition("/")[2].partition(":")
    if not name or (tag and tag not in _DEFAULT_TAGS):
        raise NotFound(f"template or snapshot {printable(text[:256])!r} not found")
    return name


def create_request(body: wire.NewSandboxV2, settings: Settings) -> CreateRequest:
    """Raises: NotFound for a template with an unknown tag."""
    network = body.network or wire.Network()
    if body.auto_pause is None:
        on_timeout = OnTimeout(settings.default_on_timeout)
    else:
        on_timeout = OnTimeout.PAUSE if body.auto_pause else OnTimeout.KILL
    return CreateRequest(
        template=reference(body.template_id),
        timeout_s=body.timeout or settings.default_timeout_s,
        on_timeout=on_timeout,
        metadata=body.metadata or {},
        env=body.env_vars or {},
        secure=not isinstance(body, wire.NewSandbox) or body.secure is not False,
        policy=NetworkPolicy(
            internet=body.allow_internet_access is not False,
            allow_out=tuple(network.allow_out or ()),
            deny_out=tuple(network.deny_out or ()),
        ),
        public_traffic=network.allow_public_traffic is not False,
    )


def sandbox(view: SandboxView, settings: Settings) -> wire.Sandbox:
    return wire.Sandbox(
        template_id=view.template_id,
        sandbox_id=view.id,
        envd_version=view.envd_version,
        alias=view.alias,
        envd_access_token=view.access_token,
        traffic_access_token=view.traffic_token,
        domain=settings.domain or None,
    )


def listed(view: SandboxView) -> wire.ListedSandbox:
    return wire.ListedSandbox(
        template_id=view.template_id,
        sandbox_id=view.id,
        alias=view.alias,
        started_at=view.started_at,
        end_at=view.end_at,
        cpu_count=view.vcpus,
        memory_mb=view.memory_mib,
        disk_size_mb=view.disk_mib,
        metadata=view.metadata,
        state="paused" if view.state is PublicState.PAUSED else "running",
        envd_version=view.envd_version,
        envd_unresponsive_at_pause=view.guest_unresponsive_at_pause or None,
    )


def detail(view: SandboxView, settings: Settings) -> wire.SandboxDetail:
    return wire.SandboxDetail(
        **listed(view).model_dump(by_alias=False),
        envd_access_token=view.access_token,
        allow_internet_access=view.policy.internet,
        domain=settings.domain or None,
        network=wire.NetworkDetail(
            allow_out=list(view.policy.allow_out),
            deny_out=list(view.policy.deny_out),
            allow_public_traffic=view.traffic_token is None,
        ),
        lifecycle=wire.Lifecycle(
            on_timeout="kill" if view.on_timeout is OnTimeout.KILL else "pause", auto_resume=False
        ),
    )


def fork_result(child: SandboxView | AenvError, settings: Settings) -> wire.ForkResult:
    if isinstance(child, AenvError):
        return wire.ForkResult(error=wire.Error(code=row_of(child).status, message=printable(str(child))))
    return wire.ForkResult(sandbox=sandbox(child, settings))


def snapshot(view: SnapshotView) -> wire.Snapshot:
    return wire.Snapshot(
        snapshot_id=view.id,
        names=list(view.names),
        cpu_count=view.vcpus,
        memory_mb=view.memory_mib,
        disk_size_mb=view.disk_mib,
        created_at=view.created_at,
        updated_at=view.created_at,
    )
