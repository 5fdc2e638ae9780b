# Set-up shared by serve.sh and test.sh; sourced, never run. Defines ROOT, VENV and PYTHON, say, die and setup.
# The environment is .venv in the project root; a stamp in it says for what it was last installed.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
# How long the installation takes where nothing is cached, for the person who waits.
FIRST_INSTALL="about 4 minutes and 12 GB of disk"
# The installation leaves bytecode to the first import. Where a container forbids to keep it (many images set this),
# every process of every server would compile SGLang again: on two cores 26 s of imports instead of 12.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# The first Python on PATH that is new enough and can make an environment. A pyenv shim may exist and still not run.
find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "no Python 3.11 or newer with the venv module is on PATH." \
        "Install one (Debian and Ubuntu: apt-get install python3 python3-venv) and run this again."
}

# What an installation depends on: the extras, the project's metadata, the interpreter, and where the project lies
# (an editable install points there).
stamp_key() {
    {
        printf '%s\n%s\n' "$1" "$ROOT"
        "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat "$ROOT/pyproject.toml"
    } | sha256sum | cut -d ' ' -f 1
}

# setup [EXTRAS]: make .venv and install the project with its extras, unless that is what it already holds.
setup() {
    local extras=${1:-} stamp
    stamp=$VENV/.installed-${extras:-base}
    # Two scripts started at once must not install into one environment together. The descriptor is closed below, or
    # the server would inherit the lock.
    if command -v flock >/dev/null; then
        exec 9>"$ROOT/.setup.lock"
        flock -n 9 || { say "waiting for another script that is setting up $VENV"; flock 9; }
    fi
    if ! "$PYTHON" -c 'import pip' >/dev/null 2>&1; then
        local python
        python=$(find_python)
        say "making the environment $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV" || die "$python could not make $VENV; see the message above."
    fi
    if [[ ! -f $stamp || $(<"$stamp") != "$(stamp_key "$extras")" ]]; then
        install "$extras"
        # Whoever has the extras has the base too.
        stamp_key "" >"$VENV/.installed-base"
        stamp_key "$extras" >"$stamp"
    fi
    if command -v flock >/dev/null; then exec 9>&-; fi
}

install() {
    local what=$ROOT log=$VENV/install.log
    [[ -z $1 ]] || what="$ROOT[$1]"
    # Whatever an earlier installation left is no longer certain once pip has begun.
    rm -f "$VENV"/.installed-*
    say "installing sglang-dsa-plugin and SGLang into $VENV (the first time: $FIRST_INSTALL)"
    # Compiling all of it to bytecode would take half of the installation's time, and most of it is never imported.
    if ! "$PYTHON" -m pip install --no-compile --disable-pip-version-check --progress-bar off -e "$what" 2>&1 |
        tee "$log" | show_progress; then
        grep -i '^ *error' "$log" | tail -n 5 >&2 || tail -n 15 "$log" >&2
        die "pip could not install the project (all of its output: $log)." \
            "Check the network or the package index and the free disk space, then run this again."
    fi
}

# pip's output as a few lines: how many packages it has found, and when it starts to write them to disk.
show_progress() {
    local line packages=0 start=$SECONDS
    while IFS= read -r line; do
        case $line in
            Collecting*)
                packages=$((packages + 1))
                ((packages % 25)) || say "  $packages packages found after $((SECONDS - start)) s"
                ;;
            "Installing collected packages"*) say "  writing them to disk" ;;
            "Successfully installed"*) say "  installed after $((SECONDS - start)) s" ;;
        esac
    done
}
