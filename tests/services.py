"""Where the tests get a real RabbitMQ, Redis, Postgres: by URL, from Docker, or private instances of what is installed.

`TEST_SERVICES` = `url` | `docker` | `local` chooses; unset, it is the first of these that can work. Other versions come
by `REDIS_IMAGE`, `POSTGRES_IMAGE`, `RABBITMQ_IMAGE`, and by `TEST_PROGRAMS`, a folder whose programs are taken before
those that are installed. Nothing here knows of pytest: `integration/conftest.py` makes fixtures of it. Everything
blocks; a test calls it by `asyncio.to_thread`.
"""

import atexit
import fcntl
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

from tests.waiting import NotInTime, wait_until

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

START_S = 90.0
INSTALL_S = 600.0
STOP_S = 30.0
LOOPBACK = "127.0.0.1"
RABBITMQ_IMAGE = "rabbitmq:4-management"
REDIS_IMAGE = "redis:8"
POSTGRES_IMAGE = "postgres:17"
DEBIAN_PACKAGES = ("rabbitmq-server", "redis-server")
POSTGRES_PACKAGE = "postgresql"
POSTGRES_PASSWORD = "test"
POSTGRES_USERS = ("postgres", "nobody")
"""Under one of these it runs where we are root, which it refuses to be."""

Say = Callable[[str], None]


class Unavailable(Exception):
    """No RabbitMQ or Redis can be had in the way that was asked for; the message says what to do."""


class Uncontrolled(Exception):
    """A server that was given by URL cannot be stopped, paused or configured: mark the test `needs_control`."""


class Engine(Protocol):
    """What a server runs on: a process of ours, a container, or somebody else's machine."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def run(self, *command: str) -> str: ...
    def output(self) -> str: ...


class _Server:
    """The part that RabbitMQ and Redis share: an address, an engine, and how to ask whether it answers."""

    name = "server"

    def __init__(self, host: str, port: int, engine: Engine) -> None:
        self.host = host
        self.port = port
        self.engine = engine
        self.started_in_s = 0.0
        """How long the last start took until the server answered."""

    @property
    def controllable(self) -> bool:
        return not isinstance(self.engine, Elsewhere)

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Start, again after `stop` or `kill` on the same port, and return when the server answers."""
        begun = time.monotonic()
        self.engine.start()
        try:
            wait_until(self.answers, within=START_S, what=f"{self.name} on port {self.port}")
        except NotInTime as late:
            raise Unavailable(f"{late}\n{self.engine.output()[-4000:]}") from late
        self.started_in_s = time.monotonic() - begun

    def stop(self) -> None:
        """Stop in good order; what the server stores on disk is kept."""
        self.engine.stop()

    def kill(self) -> None:
        """SIGKILL; what the server has on disk is kept."""
        self.engine.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def close(self) -> None:
        """Stop for good and remove everything."""
        self.engine.close()


class Rabbit(_Server):
    """One RabbitMQ node."""

    name = "RabbitMQ"

    def __init__(self, host: str, port: int, engine: Engine, *, given_url: str = "", ctl: Sequence[str] = ()) -> None:
        super().__init__(host, port, engine)
        self._given_url = given_url
        self._ctl = ctl

    @property
    def url(self) -> str:
        return self._given_url or f"amqp://guest:guest@{self.host}:{self.port}/"

    def at(self, vhost: str) -> str:
        """The URL of another virtual host."""
        return urlunsplit(urlsplit(self.url)._replace(path="/" + quote(vhost, safe="")))

    def ctl(self, *args: str) -> str:
        """`rabbitmqctl`: what it printed. About a second a call.

        Raises:
            subprocess.CalledProcessError: it failed; its output is in the exception.
            Uncontrolled: the broker was given by URL.
        """
        return self.engine.run(*self._ctl, *args)

    def write_down(self) -> None:
        """Have the broker write its tables to disk: call it after declaring quorum queues, before `kill`.

        Seen with 3.10: a queue declared up to 0.6 s before a SIGKILL is there after the restart, but empty, and does
        not answer `basic.get`; after 1.5 s, or with this, it keeps its messages. Probably a table that is saved late.
        """
        self.ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def answers(self) -> bool:
        """Whether the AMQP port speaks: Docker's proxy and the kernel accept long before the broker does."""
        return _exchange(self.host, self.port, b"AMQP\x00\x00\x09\x01", 1) == b"\x01"


class Redis(_Server):
    """One Redis or Valkey server."""

    name = "Redis"

    def __init__(self, host: str, port: int, engine: Engine, *, given_url: str = "") -> None:
        super().__init__(host, port, engine)
        self._given_url = given_url

    @property
    def url(self) -> str:
        return self._given_url or self.at(0)

    def at(self, db: int) -> str:
        """The URL of a database by its number."""
        return f"redis://{self.host}:{self.port}/{db}"

    def answers(self) -> bool:
        """Whether it answers at all: LOADING and NOAUTH are no answers to wait for."""
        return _exchange(self.host, self.port, b"PING\r\n", 5) in (b"+PONG", b"-NOAU")


class Postgres(_Server):
    """One Postgres server."""

    name = "Postgres"

    def __init__(self, host: str, port: int, engine: Engine, *, given_url: str = "") -> None:
        super().__init__(host, port, engine)
        self._given_url = given_url

    @property
    def url(self) -> str:
        return self._given_url or f"postgresql://postgres:{POSTGRES_PASSWORD}@{self.host}:{self.port}/postgres"

    def at(self, schema: str) -> str:
        """The URL of one of its schemas."""
        return f"{self.url}{'&' if '?' in self.url else '?'}search_path={schema}"

    def answers(self) -> bool:
        """Whether it lets one in: while it starts, it accepts and refuses."""
        asked = b"\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00"
        return _exchange(self.host, self.port, (len(asked) + 4).to_bytes(4, "big") + asked, 1) == b"R"


class Supply(Protocol):
    """One way of getting servers. Those it made are closed with it."""

    kind: str

    def rabbit(self) -> Rabbit: ...
    def redis(self, *args: str) -> Redis: ...
    def postgres(self) -> Postgres: ...
    def close(self) -> None: ...


def choose(environ: Mapping[str, str], say: Say) -> Supply:
    """The supply that `TEST_SERVICES` names, or the first that can work.

    Raises:
        Unavailable: none can; the message says what to do.
    """
    match environ.get("TEST_SERVICES", ""):
        case "url":
            return Given(environ)
        case "docker":
            return Docker(environ, say)
        case "local":
            return Local(environ, say)
        case "":
            return _first_that_works(environ, say)
        case other:
            raise Unavailable(f"TEST_SERVICES is {other!r}; accepted are url, docker, local, or nothing")


def _first_that_works(environ: Mapping[str, str], say: Say) -> Supply:
    if environ.get("RABBITMQ_URL") and environ.get("REDIS_URL"):
        return Given(environ)
    reasons = []
    ways: tuple[Callable[[], Supply], ...] = (lambda: Docker(environ, say), lambda: Local(environ, say))
    for way in ways:
        try:
            return way()
        except Unavailable as why:
            reasons.append(f"- {why}")
    raise Unavailable(
        "These tests need a real RabbitMQ and a real Redis, and none can be had here:\n"
        + "\n".join(reasons)
        + "\nDo one of: set RABBITMQ_URL and REDIS_URL (an empty database); start a Docker engine; install"
        + " rabbitmq-server and redis-server (on Debian or Ubuntu these tests do it themselves as root)."
    )


# Given by URL


class Elsewhere:
    """The engine of a server that is not ours."""

    def _refuse(self) -> str:
        raise Uncontrolled("a server given by URL cannot be controlled; mark the test needs_control")

    def start(self) -> None:
        """It runs already."""

    def stop(self) -> None:
        self._refuse()

    def kill(self) -> None:
        self._refuse()

    def pause(self) -> None:
        self._refuse()

    def resume(self) -> None:
        self._refuse()

    def close(self) -> None:
        """It goes on without us."""

    def run(self, *command: str) -> str:
        return self._refuse()

    def output(self) -> str:
        return ""


class Given:
    """Servers that somebody else runs, from RABBITMQ_URL and REDIS_URL."""

    kind = "url"

    def __init__(self, environ: Mapping[str, str]) -> None:
        missing = [name for name in ("RABBITMQ_URL", "REDIS_URL") if not environ.get(name)]
        if missing:
            raise Unavailable(f"TEST_SERVICES=url needs {' and '.join(missing)}")
        self._rabbit_url, self._redis_url = environ["RABBITMQ_URL"], environ["REDIS_URL"]
        self._postgres_url = environ.get("POSTGRES_URL", "")

    def rabbit(self) -> Rabbit:
        host, port = _address(self._rabbit_url, 5672)
        server = Rabbit(host, port, Elsewhere(), given_url=self._rabbit_url)
        # A TLS port does not answer the plain handshake; the first test will tell.
        if not self._rabbit_url.startswith("amqps:") and not server.answers():
            raise Unavailable(f"RABBITMQ_URL: nothing speaks AMQP at {host}:{port}")
        return server

    def redis(self, *args: str) -> Redis:
        if args:
            raise Uncontrolled("a Redis with arguments of its own cannot be had by URL; mark the test needs_control")
        host, port = _address(self._redis_url, 6379)
        server = Redis(host, port, Elsewhere(), given_url=self._redis_url)
        if not self._redis_url.startswith("rediss:") and not server.answers():
            raise Unavailable(f"REDIS_URL: no Redis answers at {host}:{port}")
        return server

    def postgres(self) -> Postgres:
        if not self._postgres_url:
            raise Unavailable("TEST_SERVICES=url needs POSTGRES_URL for the tests of the transport sql")
        host, port = _address(self._postgres_url, 5432)
        return Postgres(host, port, Elsewhere(), given_url=self._postgres_url)

    def close(self) -> None:
        """Nothing here is ours."""


# Docker


class Container:
    """A server in a container, on a fixed port of the host, so that a restart finds its clients again."""

    def __init__(self, container: "DockerContainer") -> None:
        self._container = container
        self._made = False

    @property
    def _wrapped(self) -> Any:  # docker-py is untyped
        return self._container.get_wrapped_container()

    def start(self) -> None:
        if self._made:
            self._wrapped.start()
            return
        self._container.start()
        self._made = True
        reaper().remember("container", self._container.get_container_id())

    def stop(self) -> None:
        self.resume()
        self._wrapped.stop(timeout=int(STOP_S))

    def kill(self) -> None:
        self.resume()
        self._wrapped.kill()
        self._wrapped.wait(timeout=STOP_S)

    def pause(self) -> None:
        self._wrapped.pause()

    def resume(self) -> None:
        self._wrapped.reload()
        if self._wrapped.status == "paused":
            self._wrapped.unpause()

    def close(self) -> None:
        if self._made:
            self._made = False
            identity = self._container.get_container_id()
            self._container.stop()
            reaper().forget("container", identity)

    def run(self, *command: str) -> str:
        answer = self._container.exec(list(command))
        printed = answer.output.decode(errors="replace")
        if answer.exit_code:
            raise subprocess.CalledProcessError(answer.exit_code, command, printed)
        return printed

    def output(self) -> str:
        return b"\n".join(self._container.get_logs()).decode(errors="replace")


class Docker:
    """Containers by testcontainers. Without Ryuk unless it was asked for: the reaper here does its work."""

    kind = "docker"

    def __init__(self, environ: Mapping[str, str], say: Say) -> None:
        self._rabbit_image = environ.get("RABBITMQ_IMAGE") or RABBITMQ_IMAGE
        self._redis_image = environ.get("REDIS_IMAGE") or REDIS_IMAGE
        self._postgres_image = environ.get("POSTGRES_IMAGE") or POSTGRES_IMAGE
        self._say = say
        os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
        self._require_engine()
        for image in (self._rabbit_image, self._redis_image):
            self._require_image(image, say)
        self._open = ExitStack()

    def rabbit(self) -> Rabbit:
        container, host, port = self._container(self._rabbit_image, 5672)
        container.with_env("RABBITMQ_DEFAULT_USER", "guest").with_env("RABBITMQ_DEFAULT_PASS", "guest")
        server = Rabbit(host, port, Container(container), ctl=["rabbitmqctl", "-q"])
        self._open.callback(server.close)
        server.start()
        return server

    def redis(self, *args: str) -> Redis:
        container, host, port = self._container(self._redis_image, 6379)
        # Both official images have `redis-server`, the one of Valkey by a link.
        container.with_command(["redis-server", "--save", "", "--protected-mode", "no", *args])
        server = Redis(host, port, Container(container))
        self._open.callback(server.close)
        server.start()
        return server

    def postgres(self) -> Postgres:
        self._require_image(self._postgres_image, self._say)
        container, host, port = self._container(self._postgres_image, 5432)
        container.with_env("POSTGRES_PASSWORD", POSTGRES_PASSWORD)
        container.with_command(["postgres", "-c", "fsync=off", "-c", "max_connections=200"])
        server = Postgres(host, port, Container(container))
        self._open.callback(server.close)
        server.start()
        return server

    def close(self) -> None:
        self._open.close()

    def _container(self, image: str, inner_port: int) -> tuple["DockerContainer", str, int]:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.docker_client import DockerClient

        host, port = DockerClient().host(), free_port()
        host = LOOPBACK if host == "localhost" else host
        return DockerContainer(image).with_bind_ports(inner_port, port), host, port

    def _require_engine(self) -> None:
        # docker-py raises a tree of its own, and requests', and urllib3's; whatever it is, there is no engine.
        try:
            from testcontainers.core.docker_client import DockerClient

            self._client: Any = DockerClient().client
            self._client.ping()
        except Exception as why:
            raise Unavailable(f"docker: no engine answers ({_first_line(why)})") from why

    def _require_image(self, image: str, say: Say) -> None:
        from docker.errors import ImageNotFound

        try:
            self._client.images.get(image)
        except ImageNotFound:
            say(f"pulling {image}")
            try:
                self._client.images.pull(image)
            except Exception as why:  # as above
                raise Unavailable(f"docker: {image} is not here and cannot be pulled ({_first_line(why)})") from why


# Private instances of what is installed


class Processes:
    """A server as a process group of ours, in a folder of its own that goes with it."""

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.folder = folder
        self._stop_signal = stop_signal
        self._argv = argv
        self._environ = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self._argv,
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        reaper().remember("group", str(self._process.pid))

    def stop(self) -> None:
        self.resume()
        self._end(self._stop_signal)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        reaper().forget("folder", str(self.folder))

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environ, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, group = self._process, self._process.pid
        self._signal(number)

        def gone() -> bool:
            process.poll()  # else the dead leader stays in the group as a zombie
            return not _alive(group)

        # The whole group: RabbitMQ's script ends before the Erlang machine that it started.
        try:
            wait_until(gone, within=STOP_S, what=f"the end of process group {group}")
        except NotInTime:
            self._signal(signal.SIGKILL)
            wait_until(gone, within=STOP_S, what=f"the end of process group {group} after SIGKILL")
        self._process = None
        reaper().forget("group", str(group))


class Local:
    """Private instances on free ports, as root or not, without systemd; nothing is shared with an installed service."""

    kind = "local"

    def __init__(self, environ: Mapping[str, str], say: Say) -> None:
        self._say = say
        self._given = environ.get("TEST_PROGRAMS", "")
        self._need_binaries(say)
        self._open = ExitStack()

    def rabbit(self) -> Rabbit:
        folder, port, programs = _folder("rabbit"), free_port(), _rabbit_programs(self._given)
        assert programs is not None
        node, cookie, epmd_port = f"test{port}@localhost", secrets.token_hex(8), free_port()
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(f"listeners.tcp.default = {LOOPBACK}:{port}\nlog.file.level = warning\n")
        environ = _plain_environ(folder) | {
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "gen"),
            "RABBITMQ_SCHEMA_DIR": str(folder / "schema"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-setcookie {cookie}",
            "RABBITMQ_CTL_ERL_ARGS": f"-setcookie {cookie}",
        }
        if epmd := shutil.which("epmd"):
            # Ours from the start: the one that Erlang would start itself outlives the node and every process group.
            mapper = Processes(_folder("epmd"), [epmd, "-address", LOOPBACK, "-port", str(epmd_port)], environ)
            self._open.callback(mapper.close)
            mapper.start()
        ctl = [str(programs / "rabbitmqctl"), "-q", "-n", node, "--erlang-cookie", cookie]
        server = Rabbit(LOOPBACK, port, Processes(folder, [str(programs / "rabbitmq-server")], environ), ctl=ctl)
        self._open.callback(server.close)
        server.start()
        return server

    def redis(self, *args: str) -> Redis:
        folder, port, program = _folder("redis"), free_port(), _redis_program(self._given)
        assert program is not None
        argv = [program, "--port", str(port), "--bind", LOOPBACK, "--dir", str(folder), "--save", "", *args]
        server = Redis(LOOPBACK, port, Processes(folder, argv, _plain_environ(folder)))
        self._open.callback(server.close)
        server.start()
        return server

    def postgres(self) -> Postgres:
        programs = _postgres_programs(self._given) or self._installed_postgres()
        folder, port = _folder("postgres"), free_port()
        data, environ = folder / "data", _plain_environ(folder)
        as_user: list[str] = []
        if os.geteuid() == 0:
            user = next(pwd.getpwnam(name) for name in POSTGRES_USERS if _is_user(name))
            os.chown(folder, user.pw_uid, user.pw_gid)
            as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(
            [*as_user, str(programs / "initdb"), "-D", str(data), *options],
            env=environ,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"local: initdb failed:\n{(done.stdout + done.stderr)[-2000:]}")
        settings = {
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": "200",
        }
        said = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        argv = [*as_user, str(programs / "postgres"), "-D", str(data), "-p", str(port), *said]
        # It waits for its clients to go on SIGTERM, and sends them away on SIGINT.
        server = Postgres(LOOPBACK, port, Processes(folder, argv, environ, signal.SIGINT))
        self._open.callback(server.close)
        server.start()
        return server

    def _installed_postgres(self) -> Path:
        """Installed when a test first asks for it, without the instance that Debian's package makes."""
        if not Path("/etc/debian_version").exists() or os.geteuid() != 0 or not shutil.which("apt-get"):
            raise Unavailable("local: Postgres is not installed; these tests do it only as root on Debian")
        self._say(f"installing {POSTGRES_PACKAGE} by apt-get, for tests that need a real Postgres")
        settings = Path("/etc/postgresql-common/createcluster.conf")
        if not settings.exists():
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text("create_main_cluster = false\n")
        with _one_at_a_time():
            if _postgres_programs(self._given) is None:
                _apt_get("update")
                _apt_get("install", "-y", "--no-install-recommends", POSTGRES_PACKAGE)
        if (programs := _postgres_programs(self._given)) is None:
            raise Unavailable(f"local: apt-get installed {POSTGRES_PACKAGE}, but its programs are not found")
        return programs

    def close(self) -> None:
        self._open.close()

    def _need_binaries(self, say: Say) -> None:
        if _rabbit_programs(self._given) and _redis_program(self._given):
            return
        if not Path("/etc/debian_version").exists() or os.geteuid() != 0 or not shutil.which("apt-get"):
            raise Unavailable(
                "local: rabbitmq-server and redis-server are not installed; these tests do it only as root on Debian"
            )
        say(f"installing {' and '.join(DEBIAN_PACKAGES)} by apt-get, for tests that need real servers")
        with _one_at_a_time():
            if not (_rabbit_programs(self._given) and _redis_program(self._given)):
                _apt_get("update")
                _apt_get("install", "-y", "--no-install-recommends", *DEBIAN_PACKAGES)
        if not (_rabbit_programs(self._given) and _redis_program(self._given)):
            raise Unavailable(
                f"local: apt-get installed {' and '.join(DEBIAN_PACKAGES)}, but their programs are not found"
            )


@contextmanager
def _one_at_a_time() -> Generator[None, None, None]:
    """Installing is for one process: apt-get refuses to wait for another one, and tests run in several."""
    with (Path(tempfile.gettempdir()) / "test-services-install.lock").open("w") as lock:
        wait_until(lambda: _locked(lock), within=INSTALL_S, what="another process that installs packages", every=0.5)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _apt_get(*args: str) -> None:
    environ = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    done = subprocess.run(
        ["apt-get", "-q", *args], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unavailable(f"local: apt-get {' '.join(args)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _given_program(folder: str, name: str) -> Path | None:
    """Of a folder that was named, where it has this one."""
    program = Path(folder, name).resolve()
    return program if folder and program.exists() else None


def _rabbit_programs(given: str = "") -> Path | None:
    """The folder of the programs themselves. Debian's wrapper in /usr/sbin switches to user rabbitmq; they do not."""
    if program := _given_program(given, "rabbitmq-server"):
        return program.parent
    debian = Path("/usr/lib/rabbitmq/bin")
    if (debian / "rabbitmq-server").exists():
        return debian
    found = shutil.which("rabbitmq-server")
    return Path(found).parent if found else None


def _redis_program(given: str = "") -> str | None:
    if program := _given_program(given, "redis-server") or _given_program(given, "valkey-server"):
        return str(program)
    return shutil.which("redis-server") or shutil.which("valkey-server")


def _postgres_programs(given: str = "") -> Path | None:
    """The folder of the newest one's programs; Debian has none of them in the path."""
    if program := _given_program(given, "initdb"):
        return program.parent
    found = sorted(
        (path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()),
        key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0,
    )
    if found:
        return found[-1]
    elsewhere = shutil.which("initdb")
    return Path(elsewhere).resolve().parent if elsewhere else None


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _plain_environ(folder: Path) -> dict[str, str]:
    """Enough to start a program, and nothing by which the caller's own RabbitMQ would be meant."""
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(folder)}


def _folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"test-{name}-"))
    reaper().remember("folder", str(folder))
    return folder


# What is left behind when the test process itself is killed

_REAP = """
import os, shutil, signal, subprocess, sys
left = {}
for line in sys.stdin:
    verb, kind, name = line.rstrip("\\n").split("\\t")
    if verb == "remember": left[(kind, name)] = None
    else: left.pop((kind, name), None)
for kind, name in sorted(left, key=lambda one: ("group", "container", "folder").index(one[0])):
    try:
        if kind == "group": os.killpg(int(name), signal.SIGKILL)
        elif kind == "container": subprocess.run(["docker", "rm", "-f", "-v", name], capture_output=True, timeout=60)
        else: shutil.rmtree(name, ignore_errors=True)
    except (OSError, subprocess.SubprocessError): pass
"""


class Reaper:
    """A process that outlives this one by a moment, and ends what it was told of and not told to forget.

    It sees the end of its input, which comes with our end however that came: SIGKILL and pytest-timeout run no cleanup.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _REAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        atexit.register(self._end)

    def remember(self, kind: str, name: str) -> None:
        """Kinds: `group` (a process group's id), `container`, `folder`."""
        self._tell("remember", kind, name)

    def forget(self, kind: str, name: str) -> None:
        self._tell("forget", kind, name)

    def _tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)


_reapers: list[Reaper] = []


def reaper() -> Reaper:
    """The one of this process."""
    if not _reapers:
        _reapers.append(Reaper())
    return _reapers[0]


# Small things


def free_port() -> int:
    """A free port below the range from which the kernel takes the ports of outgoing connections.

    From that range, a client that tries again and again while a server is down can connect to itself, and hold the
    port against the server's return.
    """
    while True:
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((LOOPBACK, port))
                return port


def _exchange(host: str, port: int, sent: bytes, size: int) -> bytes:
    try:
        with socket.create_connection((host, port), 1) as connection:
            connection.settimeout(2)
            connection.sendall(sent)
            return connection.recv(size)
    except OSError:
        return b""


def _address(url: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "localhost", parts.port or default_port


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _first_line(why: BaseException) -> str:
    return (str(why).splitlines() or [type(why).__name__])[0][:200]
