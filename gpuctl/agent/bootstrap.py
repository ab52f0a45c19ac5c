"""Stage 0: the first Python that runs on a node, sent on stdin by the client, before any bundle.

It is kept free of gpuctl imports: all it does is find the state directory, make sure that the
bundle with the wanted hash is there and intact, and hand over to ``gpuctl.agent.bridge`` from it.
The client sends, in this order: the activate line, the interpreter, eight digits (the length of
this source), this source, one JSON line of parameters, and the bundle (a zip) when asked for it.

The syntax is kept to Python 3.6, so that an old interpreter gets a sentence and not a traceback.
"""

import hashlib
import io
import json
import os
import shutil
import stat
import sys
import zipfile

#: One constant line for the login shell; everything that varies is read from stdin as data. It has
#: no single quote, no exclamation mark and no newline inside, so csh and fish pass it through too.
COMMAND = (
    "exec /bin/sh -c '"
    "umask 077; IFS= read -r a; IFS= read -r p; "
    'case "$p" in "~/"*) p="$HOME/${p#??}";; esac; '
    'eval "$a" </dev/null >&2; '
    'exec "$p" -c "import os;r=lambda n:bytes().join(os.read(0,1) for i in range(n));exec(r(int(r(8))))"'
    "'"
)

MAX_BUNDLE_BYTES = 64 << 20
NETWORK_FILESYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "afs", "9p", "pvfs2",
)  # fmt: skip


def filesystem_of(path: str) -> "str | None":
    """Return the type of the file system that holds ``path`` (deepest mount point), or None."""
    path = os.path.realpath(path)
    best, kind = "", None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return None
    for row in rows:
        point = row[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, row[2]
    return kind


def state_home(configured: "str | None") -> str:
    """Return ``<var>/gpuctl-UID``, made 0700 and checked to be ours.

    ``<var>`` is the configured directory, else ``/var/tmp`` or ``~/.cache``, whichever is local
    first. On a network file system the directory is keyed by machine id: homes are shared.
    """
    if configured:
        candidates = [os.path.expanduser(configured)]
    else:
        candidates = ["/var/tmp", os.path.expanduser("~/.cache")]
    problems = []
    for var in candidates:
        is_network = filesystem_of(var) in NETWORK_FILESYSTEMS
        if is_network and not configured and var != candidates[-1]:
            continue
        suffix = "-" + machine_id()[:12] if is_network else ""
        try:
            return private_dir(os.path.join(var, "gpuctl-%d%s" % (os.getuid(), suffix)))
        except OSError as exc:
            problems.append("%s: %s" % (var, exc.strerror or exc))
    raise OSError("no directory to keep gpuctl's files in (%s)" % "; ".join(problems))


def machine_id() -> str:
    """Return the machine id, or the host name where there is none."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text:
            return text
    return os.uname().nodename


def private_dir(path: str) -> str:
    """Make ``path`` 0700 (parents too) and raise OSError unless it is a directory of ours alone."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise OSError("%s is not a directory of this user" % path)
    if info.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def tree_hash(root: str) -> str:
    """Return the hash of a folder: SHA-256 over sorted ``path NUL sha256 LF`` lines.

    Byte code caches are left out: the interpreter writes them beside the sources.
    """
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as file:
                files[os.path.relpath(full, root)] = file.read()
    return tree_hash_of(files)


def tree_hash_of(files: "dict[str, bytes]") -> str:
    """Return the tree hash of ``files`` (name -> bytes)."""
    lines = ["%s\0%s\n" % (name, hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def install_tree(data: bytes, wanted: str, target: str) -> None:
    """Unpack the zip ``data`` to ``target`` if its tree hash is ``wanted``; raises ValueError."""
    scratch = "%s.%d.tmp" % (target, os.getpid())
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                extract_member(archive, info, scratch)
        found = tree_hash(scratch)
        if found != wanted:
            raise ValueError("the bundle's hash is %s, not %s" % (found, wanted))
        publish_tree(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def extract_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, root: str) -> None:
    """Write one file of the zip below ``root``; names that would leave it are refused."""
    name = info.filename
    if name.startswith("/") or ".." in name.split("/") or name.endswith("/"):
        raise ValueError("a bundle member named %r" % name)
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(archive.read(info))
    if (info.external_attr >> 16) & 0o100:
        os.chmod(path, 0o700)


def publish_tree(scratch: str, target: str) -> None:
    """Rename into place; a twin that another launch put there meanwhile is as good."""
    try:
        os.rename(scratch, target)
    except OSError:
        if not os.path.isdir(target):
            raise


def is_intact(path: str, wanted: str) -> bool:
    """Return whether the tree at ``path`` is there and has the hash ``wanted``."""
    return os.path.isdir(path) and tree_hash(path) == wanted


def read_exactly(size: int) -> bytes:
    """Read ``size`` bytes from stdin without reading past them."""
    parts = []
    while size > 0:
        part = os.read(0, min(size, 1 << 16))
        if not part:
            raise EOFError("the client closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_line() -> bytes:
    """Read one line from stdin, a byte at a time: what follows belongs to others."""
    line = b""
    while not line.endswith(b"\n"):
        line += read_exactly(1)
        if len(line) > 1 << 20:
            raise ValueError("a parameter line over 1 MiB")
    return line


def say(nonce: str, **fields: object) -> None:
    """Answer the client with one line that no shell noise can be taken for."""
    os.write(1, ("\n%s %s\n" % (nonce, json.dumps(fields))).encode())


def main() -> None:
    """Answer the client, install the bundle if it is missing, become the bridge."""
    sys.path[:] = [entry for entry in sys.path if entry]  # the current folder may hold a random.py
    parameters = json.loads(read_line())
    nonce, wanted = parameters["nonce"], parameters["bundle"]
    try:
        if sys.version_info < (3, 10):
            raise OSError("Python %d.%d; gpuctl needs 3.10 or newer" % sys.version_info[:2])
        home = state_home(parameters.get("state_dir"))
        bundles = private_dir(os.path.join(home, "bundles"))
        target = os.path.join(bundles, wanted)
        intact = is_intact(target, wanted)
        say(nonce, have_bundle=intact, home=home, python=sys.executable, version=sys.version.split()[0])
        if not intact:
            size = int(read_line())
            if size > MAX_BUNDLE_BYTES:
                raise ValueError("a bundle of %d bytes" % size)
            shutil.rmtree(target, ignore_errors=True)
            install_tree(read_exactly(size), wanted, target)
        say(nonce, ready=True)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as exc:
        say(nonce, error="%s" % exc)
        return
    sys.path.insert(0, target)
    from gpuctl.agent.bridge import main as serve

    serve(home, parameters)


if __name__ == "__main__":
    main()
