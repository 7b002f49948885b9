#!/usr/bin/env bash
# Prepares apptainer for tests/live/apptainer under .tools/apptainer (90 MB, a minute, on Debian): the package of Debian sid with
# the libraries it was built for, unpacked and not installed. patchelf has its programs use those, whatever the machine's are.
# Mounting a SIF file also takes squashfuse of the machine (apt-get install squashfuse), building one squashfs-tools.
set -euo pipefail
tools="$(cd "$(dirname "$0")/../../.." && mkdir -p .tools && cd .tools && pwd -P)"
[ -x "$tools/apptainer/usr/bin/apptainer" ] && exit 0
work="$(mktemp -d -p "$tools")"
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work"/{lists/partial,cache/archives/partial,debs,root}

keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian sid main" > "$work/sources.list"
: > "$work/status"
apt=(apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/nonexistent -o Dir::State="$work"
    -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache"
    -o APT::Sandbox::User="$(id -un)" -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
"${apt[@]}" update
(cd "$work/debs" && "${apt[@]}" download apptainer libc6 libseccomp2 libsqlite3-0 patchelf libstdc++6 libgcc-s1)
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done

root="$tools/apptainer"
libraries=usr/lib/x86_64-linux-gnu
patchelf() {
    "$work/root/$libraries/ld-linux-x86-64.so.2" --library-path "$work/root/$libraries" "$work/root/usr/bin/patchelf" "$@"
}
for program in usr/bin/apptainer "$libraries/apptainer/bin/starter"; do
    patchelf --set-interpreter "$root/$libraries/ld-linux-x86-64.so.2" "$work/root/$program"
    patchelf --force-rpath --set-rpath "$root/$libraries" "$work/root/$program"
done
# Apptainer looks for its settings beside its programs when it is not where it was built for.
for place in etc var; do
    ln -s "../$place" "$work/root/usr/$place"
    ln -s "../../$place" "$work/root/usr/lib/$place"
done
chmod 755 "$work/root"
mv "$work/root" "$root"
"$root/usr/bin/apptainer" --version
