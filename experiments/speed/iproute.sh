# Unpacks iproute2 and its libraries into .iproute/ (ignored by git), to be carried to a machine that
# has neither it nor a package registry: bash experiments/speed/iproute.sh
# There: ZPP_LAB_IPROUTE=$PWD/.iproute (run.sh sets it). The default packages are those of Debian 12;
# PACKAGES="..." names others. Nothing is installed. They need a C library at least as new as here.
set -eu
packages="${PACKAGES:-iproute2 libbpf1 libelf1 libmnl0 libbsd0 libmd0 libcap2 libxtables12 zlib1g}"
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -q $packages
for package in *.deb; do dpkg -x "$package" root; done
rm -rf "$here/.iproute"
mkdir -p "$here/.iproute/bin" "$here/.iproute/lib"
for tool in ip tc; do cp -L "$(find root -type f -path "*bin/$tool" | head -1)" "$here/.iproute/bin/"; done
find root -name 'lib*.so.*' | while read -r library; do # by the names that programs ask for
  [ -e "$library" ] && cp -L "$library" "$here/.iproute/lib/"
done
du -sh "$here/.iproute"
LD_LIBRARY_PATH="$here/.iproute/lib" "$here/.iproute/bin/tc" -Version
LD_LIBRARY_PATH="$here/.iproute/lib" "$here/.iproute/bin/ip" -Version
