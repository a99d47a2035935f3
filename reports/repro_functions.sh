# shellcheck shell=bash
# Functions of a reproduction's run.sh: copied into it as they are. Needs HERE, PYTHON, WORK and SHORT.
declare -A PID
launch() { # launch UNIT COMMAND...: in a process group of its own, so that a signal reaches every process of it
  local unit=$1
  shift
  setsid "$@" >>"$WORK/$unit.log" 2>&1 &
  PID[$unit]=$!
}
clean_up() {
  local unit
  for unit in "${!PID[@]}"; do
    kill -KILL -- "-${PID[$unit]}" 2>/dev/null || true
    wait "${PID[$unit]}" 2>/dev/null || true
  done
  rm -rf "$SHORT"
  echo "answers and logs: $WORK"
}
trap clean_up EXIT
ready() { # ready UNIT URL: wait at most 5 minutes for its health endpoint
  local i
  for ((i = 0; i < 300; i++)); do
    curl -sf --noproxy '*' -m 2 -o /dev/null "$2" && return
    kill -0 "${PID[$1]}" 2>/dev/null || break
    sleep 1
  done
  echo "$1 is not ready; last lines of $WORK/$1.log:" >&2
  tail -n 20 "$WORK/$1.log" >&2
  exit 1
}
warm_up() { # warm_up URL MODEL: the first answers of an engine compile kernels (20 s were seen) and measure nothing
  curl -s --noproxy '*' -m 180 -o /dev/null -H 'Content-Type: application/json' "$1/v1/completions" --data-binary \
    "{\"model\": \"$2\", \"prompt\": [5, 6, 7], \"max_tokens\": 2, \"logprobs\": 1, \"return_tokens_as_token_ids\": true}" || true
}
signal_unit() { # signal_unit SIGNAL UNIT: to every process of the unit
  echo "signal $1 to $2 (process group ${PID[$2]})"
  kill "-$1" -- "-${PID[$2]}"
}
ask() { # ask NUMBER URL SECONDS: send a request of prompts.json, compare with the recorded answer
  "$PYTHON" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))["requests"][int(sys.argv[2])]["body"]))' \
    "$HERE/prompts.json" "$1" |
    curl -sS --noproxy '*' -m "$3" -o "$WORK/answer-$1.json" -w '%{http_code} %{time_total}' \
      -H 'Content-Type: application/json' --data-binary @- "$2" >"$WORK/status-$1" 2>"$WORK/error-$1" || true
  "$PYTHON" - "$HERE/prompts.json" "$1" "$WORK" <<'COMPARE'
import json, pathlib, sys
prompts, number, work = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
request = json.load(open(prompts))["requests"][number]
then = request["recorded"]
status, seconds = (work / f"status-{number}").read_text().split() or ("000", "0")
tokens, cached = [], None
try:
    answer = json.loads((work / f"answer-{number}.json").read_text())
    tokens = answer["choices"][0].get("token_ids") or []
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
except (OSError, ValueError, LookupError, AttributeError) as error:
    print(f"  no answer: {error!r} in {work}/answer-{number}.json")
if then["error"]:
    print(f"  recorded error: {then['error']}")
same = "no tokens, as recorded" if not tokens and not then["output_token_ids"] else "same tokens" if tokens == then["output_token_ids"] else f"tokens {tokens}, recorded {then['output_token_ids']}"
print(
    f"request {number} ({request['role']}, {request['engine']}): HTTP {status} in {float(seconds):.2f} s"
    f" (recorded {then['http_status']} in {then['duration_s']:.2f} s); cached {cached}"
    f" (recorded {then['cached_tokens']}); {same}"
)
COMPARE
}
ASKED=()
finished() { # wait for the requests in flight
  [ ${#ASKED[@]} -eq 0 ] || wait "${ASKED[@]}"
  ASKED=()
}
saved() { # saves are asynchronous: wait (at most 60 s) until the store's list of keys has stopped growing
  local i now before=-1
  for ((i = 0; i < 30; i++)); do
    now=$(curl -s --noproxy '*' -m 5 "$1/get_all_keys" | wc -l)
    [ "$now" = "$before" ] && return
    before=$now
    sleep 2
  done
}
