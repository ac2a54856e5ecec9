"""pytest in a process that has imported the large libraries already, where there is one.

Sixty entries of the suite compare with torch, transformers or peft, and importing those takes up to ten seconds of a core: without
this an eighth of the suite. So `./dev test` keeps a server that has imported them and forks a child for each entry.

Usage: warm_pytest.py serve SOCKET MODULE...   until it is killed, or its parent ends
       warm_pytest.py ARGUMENTS                pytest's: of a child of the server at $LM_WARM_PYTEST, with this process's arguments,
                                               environment, directory, input and output; without a server in this process

A child ends with the process that asked for it, as one that was killed for its time would have."""

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback

LENGTH = struct.Struct("<I")
STREAMS = (0, 1, 2)


def receive(connection, size):
    out = b""
    while len(out) < size:
        part = connection.recv(size - len(out))
        if not part:
            raise ConnectionError
        out += part
    return out


def run_here(arguments):
    import pytest
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    return int(pytest.main(arguments))


def ask(path, arguments):
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendmsg([LENGTH.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", STREAMS))])
        connection.sendall(request)
        return LENGTH.unpack(receive(connection, LENGTH.size))[0]


def take_request(connection):
    streams = array.array("i")
    size, ancillary, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(len(STREAMS) * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    if len(size) < LENGTH.size:
        raise ConnectionError
    return list(streams), json.loads(receive(connection, LENGTH.unpack(size)[0]))


def end_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_child(streams, request):
    """Never returns."""
    end_with_parent()
    os.setsid()  # its programs end with it
    # A shell starts what it does not wait for with these ignored, and programs that the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for stream, descriptor in zip(STREAMS, streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    code = 1
    try:
        code = run_here(request["arguments"])
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()  # nobody else would say it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an interpreter that frees what was imported takes another second


class Server:
    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.events = selectors.DefaultSelector()
        self.events.register(self.listener, selectors.EVENT_READ, self.accept)

    def run(self):
        while True:
            for key, _ in self.events.select():
                if key.fd in self.events.get_map():  # what came before it may have ended it
                    key.data()

    def accept(self):
        connection, _ = self.listener.accept()
        try:
            streams, request = take_request(connection)
        except ConnectionError:
            connection.close()
            return
        child = os.fork()
        if child == 0:
            connection.close()
            for key in self.events.get_map().values():
                os.close(key.fd)
            run_child(streams, request)
        for descriptor in streams:
            os.close(descriptor)
        ended = os.pidfd_open(child)
        watched = (connection, ended)
        self.events.register(ended, selectors.EVENT_READ, lambda: self.answer(child, watched))
        # Who asked says nothing more: it is gone.
        self.events.register(connection, selectors.EVENT_READ, lambda: self.kill(child, watched))

    def answer(self, child, watched):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            watched[0].sendall(LENGTH.pack(code if code >= 0 else 128 - code))
        except OSError:
            pass  # gone as well
        self.forget(watched)

    def kill(self, child, watched):
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:  # not yet at setsid()
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.forget(watched)

    def forget(self, watched):
        connection, ended = watched
        for each in watched:
            self.events.unregister(each)
        connection.close()
        os.close(ended)


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        end_with_parent()
        server = Server(arguments[1])  # who asks while it imports waits
        for module in arguments[2:]:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # else children look through what was imported again and again, and copy its pages as they do
        server.run()
    if path := os.environ.pop("LM_WARM_PYTEST", None):
        try:
            sys.exit(ask(path, arguments))
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # it has ended
        except ConnectionError:
            sys.exit("warm_pytest.py: the server ended before the tests did")
    sys.exit(run_here(arguments))


if __name__ == "__main__":
    main()
