# Sourced: unpacks packages of another Debian suite into a folder, beside the system and without changing it.
#   debian_unpack FOLDER SUITE COMPONENTS PACKAGE...
# The mirror is the one that the system's own apt uses; packages are checked against Debian's keys.
debian_unpack() {
  local folder=$1 suite=$2 components=$3 work mirror package
  shift 3
  command -v apt-get >/dev/null || { echo "debian_unpack: apt-get is missing: this works on Debian" >&2; return 1; }
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)
  [ -n "$mirror" ] || { echo "debian_unpack: apt has no Debian mirror" >&2; return 1; }
  work=$(mktemp -d)
  mkdir -p "$folder" "$work"/{lists,cache,debs}/partial
  : >"$work/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite $components" >"$work/sources.list"
  cat >"$work/apt.conf" <<EOF
Dir::State::Lists "$work/lists";
Dir::State::Status "$work/status";
Dir::Cache "$work/cache";
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "-";
APT::Sandbox::User "";
EOF
  (
    set -e
    export APT_CONFIG=$work/apt.conf
    cd "$work/debs"
    apt-get update -qq
    apt-get download -qq "$@"
  ) || { rm -rf "$work"; return 1; }
  for package in "$work"/debs/*.deb; do dpkg -x "$package" "$folder"; done
  rm -rf "$work"
}
