#!/usr/bin/env bash
# A compiler whose programs run on every Linux since glibc 2.28, without a container: gcc 10 and glibc 2.31 of Debian 11 in
# a folder, as FOLDER/bin/{gcc,g++}. ci/manylinux_toolchain.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?usage: ci/manylinux_toolchain.sh FOLDER}")
. "$(dirname "$0")/debian_suite.sh"
rm -rf "$folder"
root=$folder/root
debian_unpack "$root" bullseye main \
  gcc-10 g++-10 cpp-10 libgcc-10-dev libstdc++-10-dev libstdc++6 libgcc-s1 libc6 libc6-dev linux-libc-dev libcrypt1 libcrypt-dev \
  libisl23 libmpc3 libmpfr6 libgmp10 zlib1g libzstd1
# Links to /lib/... have to stay inside the folder.
find "$root" -type l -lname '/*' | while read -r link; do
  ln -sfn "$(realpath -ms --relative-to="$(dirname "$link")" "$root$(readlink "$link")")" "$link"
done
mkdir -p "$folder/bin"
libraries=$root/usr/lib/$(gcc -print-multiarch 2>/dev/null || echo "$(uname -m)-linux-gnu")
for tool in gcc g++; do
  cat >"$folder/bin/$tool" <<EOF
#!/bin/sh
exec "$root/usr/bin/$tool-10" --sysroot="$root" "\$@"
EOF
  chmod +x "$folder/bin/$tool"
done
# The compiler proper is a program of the host; where the host lacks its libraries, those of the folder serve.
if ! echo 'int main() {}' | "$folder/bin/g++" -x c++ - -o /dev/null 2>/dev/null; then
  mkdir -p "$folder/lib"
  cp -P "$libraries"/lib{isl,mpc,mpfr,gmp}.so.* "$folder/lib/"
  sed -i "2i export LD_LIBRARY_PATH=\"$folder/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\"" "$folder"/bin/g*
  echo 'int main() {}' | "$folder/bin/g++" -x c++ - -o /dev/null
fi
