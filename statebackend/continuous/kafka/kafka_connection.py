"""How a Kafka cluster is reached: servers, options by librdkafka's names, and secrets.

Secrets come from a function of the user's, in each process that connects. So no closure, log or
checkpoint holds one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pickletools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

from statebackend.errors import ConnectorError, EnvironmentMissingError, SettingError
from statebackend.system import System
from statebackend.texts import install_extra

__all__ = [
    "CALL_S",
    "KafkaConnection",
    "Options",
    "Secrets",
    "is_passing",
    "is_unknown_topic",
    "kafka_module",
    "retry_while_unknown",
]

Options = Mapping[str, str | int | float | bool]
Secrets = Callable[[], Mapping[str, str]]

T = TypeVar("T")
CALL_S: Final = 30.0  # for one answer of the cluster
# Brokers hear of a new topic one after the other (librdkafka: topic.metadata.propagation.max.ms).
_SPREAD_S: Final = 10.0
_AGAIN_S: Final = 0.05
_SECRET: Final = re.compile(r"password|passphrase|secret|key\.pem|oauthbearer\.config|jaas|\.token")
# What the source and the sink set themselves: their arguments say it, or it must be so.
_OURS: Final = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "group.id", "group.instance.id"),
        *("enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset"),
        *("isolation.level", "enable.partition.eof", "transactional.id", "enable.idempotence"),
        *("acks", "request.required.acks", "delivery.report.only.error"),
    }
)
_log = logging.getLogger("statebackend.kafka")
# librdkafka says these of every broker that goes, and connects again by itself.
_PASSING: Final = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT"})


def kafka_module() -> Any:
    """The package confluent_kafka.

    Raises:
        EnvironmentMissingError: it is not installed.
    """
    try:
        import confluent_kafka
    except ImportError as error:
        raise EnvironmentMissingError(
            "The package confluent-kafka is missing.",
            todo=install_extra("kafka", "on the driver and on every executor"),
        ) from error
    return confluent_kafka


def is_passing(error: ConnectorError) -> bool:
    """Whether the cluster did not answer at all: its brokers may be back soon."""
    cause = error.__cause__
    return isinstance(cause, kafka_module().KafkaException) and cause.args[0].name() in _PASSING


def is_unknown_topic(error: Any) -> bool:
    """Whether a `KafkaException` says that there is no such topic."""
    return error.args[0].name() in ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC")


def retry_while_unknown(ask: Callable[[], T], system: System) -> T:
    """Ask a broker about topics, again and again while it does not know them.

    Raises:
        KafkaException: the cluster does not say, or no broker has heard of a topic for 10 s.
    """
    until_s = system.monotonic_s() + _SPREAD_S
    while True:
        try:
            return ask()
        except kafka_module().KafkaException as error:
            if not is_unknown_topic(error) or system.monotonic_s() > until_s:
                raise
        system.sleep_s(_AGAIN_S)


@dataclass(frozen=True)
class KafkaConnection:
    """A cluster, and how to log in. Can be pickled; nothing is opened.

    Attributes:
        servers: ``host:port`` of some brokers, separated by commas.
        options: by librdkafka's names, such as ``security.protocol``; no secrets.
        secrets: gives the options that are secret, in each process that connects.
    """

    servers: str
    options: Options = field(default_factory=dict)
    secrets: Secrets | None = None

    def __post_init__(self) -> None:
        """Raises `SettingError` for options that are ours or hold a secret."""
        if not isinstance(self.servers, str) or not self.servers.strip() or "@" in self.servers:
            raise SettingError(
                "bootstrap_servers= names no Kafka brokers.",
                todo='Give "host:port", or several of them separated by commas.',
            )
        for name in self.options:
            _check_option(name)
        if self.secrets is not None:
            _check_secrets(self.secrets)

    def __repr__(self) -> str:
        return f"KafkaConnection({self.servers!r})"

    def settings(self, defaults: Options | None = None, **own: Any) -> dict[str, Any]:
        """For a client of librdkafka; with the secrets, so it is kept nowhere.

        Args:
            defaults: where the user has named no value. own: whatever the user has named, with
                ``_`` for ``.``.
        """
        made = {
            name if name.endswith("_cb") else name.replace("_", "."): value
            for name, value in own.items()
        }
        return {
            "client.id": "statebackend",
            **(defaults or {}),
            **self.options,
            **(self.secrets() if self.secrets is not None else {}),
            "bootstrap.servers": self.servers,
            "logger": _log,
            **made,
        }

    def client(
        self,
        make: Callable[[dict[str, Any]], Any],
        defaults: Options | None = None,
        **own: Any,
    ) -> Any:
        """A client of librdkafka; see `settings`.

        Raises:
            SettingError: an option that there is not, or a value that it does not take.
        """
        kafka = kafka_module()
        try:
            return make(self.settings(defaults, **own))
        except kafka.KafkaException as error:
            raise SettingError(
                f"A client of Kafka does not take its options: {self.shown(error)}.",
                todo="Look the option up in librdkafka's CONFIGURATION.md.",
            ) from None  # librdkafka repeats values, and one may be a secret

    def shown(self, error: BaseException) -> str:
        """What an error says, without secrets."""
        found = error.args[0] if error.args else error
        text = found.str() if hasattr(found, "str") else str(found)
        for secret in self.secrets().values() if self.secrets is not None else ():
            if secret:
                text = text.replace(str(secret), "***")
        return text.strip().rstrip(".")

    def failed(self, what: str, error: BaseException) -> NoReturn:
        """Raise a `ConnectorError` that says what failed, and why."""
        raise ConnectorError(
            f"{what} of the Kafka cluster {self.servers} failed: {self.shown(error)}.",
            todo="Check that its brokers run, that this host may reach them, and that this user "
            "may do this.",
        ) from error

    def watcher(self) -> ErrorWatcher:
        """For a client's ``error_cb``."""
        return ErrorWatcher(self)


class ErrorWatcher:
    """Takes what librdkafka says about its connections: most of it passes by itself."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._fatal: Any = None

    def __call__(self, error: Any) -> None:
        if error.name() in _PASSING and not error.fatal():
            _log.info("Kafka cluster %s: %s", self._connection.servers, error.str())
        else:
            self._fatal = self._fatal or error

    def check(self, what: str) -> None:
        """Raises `ConnectorError` for what does not pass by itself, such as a wrong password."""
        if self._fatal is not None:
            self._connection.failed(what, kafka_module().KafkaException(self._fatal))


def _check_option(name: str) -> None:
    if name in _OURS:
        raise SettingError(
            f"The option {name!r} is set by the source and the sink themselves.",
            todo="Leave it out, and look at their arguments.",
        )
    if _SECRET.search(name):
        raise SettingError(
            f"The option {name!r} holds a secret.",
            todo=f"Leave it out, and pass secrets=, a function that returns {{{name!r}: ...}}.",
        )


def _check_secrets(secrets: Secrets) -> None:
    """Refuse a function that carries values along: they would be shipped with it."""
    given: Any = secrets
    held: list[Any] = [] if callable(given) else [""]
    if isinstance(given, functools.partial):
        held += [*given.args, *given.keywords.values()]
    elif inspect.isfunction(given):
        held += [cell.cell_contents for cell in given.__closure__ or ()]
        held += [*(given.__defaults__ or ()), *(given.__kwdefaults__ or {}).values()]
    if any(isinstance(one, str | bytes | Mapping) for one in held) or _ships_a_secret(given):
        raise SettingError(
            "secrets= must be a function that holds no values: they would be sent along with it.",
            todo="Have it read them where it runs, such as from an environment variable or a file.",
        )


def _ships_a_secret(secrets: Secrets) -> bool:
    """Whether a secret is in what would be sent: by a global variable, an object, or the code."""
    from pyspark import cloudpickle

    dumps: Any = cloudpickle.dumps  # has no types
    try:
        said, sent = secrets(), dumps(secrets)
    except Exception:
        return False  # what it reads is not here: so it does not hold it
    values = {str(value) for name, value in said.items() if _SECRET.search(name)}
    parts = (part for _, part, _ in pickletools.genops(sent))
    texts = (one.decode(errors="replace") if isinstance(one, bytes) else one for one in parts)
    return any(isinstance(one, str) and one in values for one in texts)
