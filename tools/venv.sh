# Sourced by tools/test, tools/demo and .ci/run: virtual environments that are made once and made again when
# pyproject.toml, the constraints or the interpreter change. Everything it says goes to standard error.

say() { printf '%s\n' "$*" >&2; }

# Print an interpreter of Python 3.11 or later: $PYTHON, or the first one found.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say 'kvstore needs Python 3.11 or later: install it (apt-get install python3 python3-venv), or name one with PYTHON=…'
    return 1
}

# new_venv DIR: an empty environment there, whatever was there before.
new_venv() {
    local python
    python=$(find_python) || return
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say "$python cannot make virtual environments: install its venv module (apt-get install python3-venv)"
        return 1
    fi
    rm -rf -- "$1" && "$python" -m venv "$1"
}

# install_into DIR ARGUMENTS…: one call of pip; it talks on a terminal and keeps quiet elsewhere.
install_into() {
    local directory=$1 quiet=()
    shift
    [[ -t 2 ]] || quiet=(--quiet --quiet)
    "$directory/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" "$@" >&2
}

# share_packages DIR BENEATH: what the environment DIR lacks is found in BENEATH.
share_packages() {
    "$1/bin/python" - "$2" <<'PYTHON'
import pathlib, sys, sysconfig
beneath = pathlib.Path(sys.argv[1]).resolve() / pathlib.Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
pathlib.Path(sysconfig.get_path("purelib"), "beneath.pth").write_text(f"import site; site.addsitedir({str(beneath)!r})\n")
PYTHON
}

# ensure_venv DIR NAME BENEATH ARGUMENTS…: an environment in which pip has installed ARGUMENTS, on top of the packages
# of the environment BENEATH if that isn't empty. The stamp NAME in it tells that this was done; "dev" includes all
# others. An install that was broken off leaves no stamp and is begun anew.
ensure_venv() {
    local directory=$1 name=$2 beneath=$3 python digest stamp known=
    shift 3
    python=$(find_python) || return
    digest=$({ printf '%s\n' "$PWD"; "$python" -VV; cat pyproject.toml tools/venv.sh tools/constraints*.txt; } | sha256sum)
    for stamp in "$name" dev; do
        [[ $(cat "$directory/.stamp-$stamp" 2>/dev/null) == "$digest" ]] && return
    done
    for stamp in "$directory"/.stamp-*; do
        [[ $(cat "$stamp" 2>/dev/null) == "$digest" ]] && known=yes
    done
    if [[ -z $known ]]; then
        say "Making $directory; the first time this takes some minutes"
        new_venv "$directory" || return
        [[ -z $beneath ]] || share_packages "$directory" "$beneath" || return
    fi
    install_into "$directory" "$@" || return
    printf '%s\n' "$digest" >"$directory/.stamp-$name"
}
