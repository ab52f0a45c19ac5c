#!/bin/sh
# Find an sshd for the cluster tests and print its path: the system's, or Debian's, unpacked under .cache/.
# Nothing is installed and no service is started. Exit code 1, one line on stderr, when none can be had.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cache="$root/.cache/sshd"

if [ -z "${GPUCTL_HIDE_SSHD:-}" ]; then
  for candidate in "$(command -v sshd 2>/dev/null || true)" /usr/sbin/sshd /usr/local/sbin/sshd; do
    [ -n "$candidate" ] && [ -x "$candidate" ] && echo "$candidate" && exit 0
  done
fi
[ -x "$cache/sshd" ] && echo "$cache/sshd" && exit 0

give_up() { echo "no sshd: $1 (install openssh-server to run the cluster tests)" >&2; exit 1; }
command -v apt-get >/dev/null || give_up "this is no Debian or Ubuntu machine to fetch it from"
command -v dpkg >/dev/null || give_up "dpkg is missing"

mkdir -p "$cache/debs" "$cache/root" "$cache/lists/partial" "$cache/archives/partial"
# lists of our own: an ordinary user cannot write the system's, and a fresh machine has none
options="-o Dir::State::Lists=$cache/lists -o Dir::Cache=$cache -o APT::Sandbox::User= -o Debug::NoLocking=1"
if ! (cd "$cache/debs" && apt-get $options download openssh-server >/dev/null 2>&1); then
  apt-get $options update >/dev/null 2>&1 || give_up "the package lists cannot be fetched"
  (cd "$cache/debs" && apt-get $options download openssh-server >/dev/null 2>&1) || give_up "it cannot be downloaded"
fi
unpack() { for deb in "$cache"/debs/*.deb; do dpkg -x "$deb" "$cache/root"; done; }
unpack
sshd="$cache/root/usr/sbin/sshd"
libraries="$cache/root/usr/lib:$cache/root/lib"
for folder in "$cache"/root/usr/lib/*-linux-gnu "$cache"/root/lib/*-linux-gnu; do libraries="$libraries:$folder"; done

# the libraries it links to that this machine has not got, by the package that Debian puts them in
missing=$(LD_LIBRARY_PATH=$libraries ldd "$sshd" | sed -n 's/^[[:space:]]*\(lib[^ ]*\) => not found/\1/p')
for library in $missing; do
  case $library in
    libwrap.so.0) package=libwrap0 ;;
    libaudit.so.1) package=libaudit1 ;;
    libpam.so.0) package=libpam0g ;;
    libsystemd.so.0) package=libsystemd0 ;;
    libselinux.so.1) package=libselinux1 ;;
    libgssapi_krb5.so.2) package=libgssapi-krb5-2 ;;
    libkrb5.so.3) package=libkrb5-3 ;;
    libcom_err.so.2) package=libcom-err2 ;;
    libcrypt.so.1) package=libcrypt1 ;;
    libnsl.so.2) package=libnsl2 ;;
    *) give_up "the package of $library is not known" ;;
  esac
  (cd "$cache/debs" && apt-get $options download "$package" >/dev/null 2>&1) || give_up "$package cannot be downloaded"
done
unpack
for folder in "$cache"/root/usr/lib/*-linux-gnu "$cache"/root/lib/*-linux-gnu; do libraries="$libraries:$folder"; done
LD_LIBRARY_PATH=$libraries ldd "$sshd" | grep -q 'not found' && give_up "libraries are still missing"

# sshd re-executes itself by its own path: the wrapper gives it the libraries and keeps that path true
cat >"$cache/sshd" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" exec "$sshd" "\$@"
WRAPPER
chmod 755 "$cache/sshd"
echo "$cache/sshd"
