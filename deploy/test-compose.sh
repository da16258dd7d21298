#!/usr/bin/env bash
# Does what docs/deploy.md tells a person with Docker to do: brings the laptop profile up, sends requests through it,
# looks at the answers and the bill, stops it while requests run, and takes it away.   deploy/test-compose.sh [IMAGE]
set -euo pipefail
cd "$(dirname "$0")/compose-replica"
export COMPOSE_PROJECT_NAME=inference-worker-test-$$ SIDECAR_IMAGE=${1:-inference-worker:test} SIDECAR_PUBLISH=127.0.0.1:0
export COMPOSE_PROFILES=laptop
started=$SECONDS
most_s=300 # from nothing to answers: what the docs promise

fail() { # say what is wrong, and what the services said
  echo "FAILED: $*" >&2
  docker compose ps -a >&2 || true
  docker compose logs --no-color --tail 40 laptop-worker mock-model billing metric-server >&2 || true
  exit 1
}
cleanup() {
  timeout 120 docker compose down --volumes --timeout 2 >/dev/null 2>&1 || true
  rm -rf "$room"
}
trap cleanup EXIT
room=$(mktemp -d)

one_off() { timeout 90 docker compose run --rm -T --no-deps "$@" 2> >(grep -vE '^ (Container|Network|Volume) ' >&2); }
send() { one_off --entrypoint python laptop-worker - "$@" <../../tests/send.py; }
ask() { # ask SERVICE PORT: what a sink has seen
  docker compose exec -T "$1" python -c "import urllib.request as r; print(r.urlopen('http://127.0.0.1:$2/', timeout=5).read().decode())"
}
until_says() { # until_says PATTERN COMMAND...: within 30 s
  local pattern=$1 said=; shift
  for _ in $(seq 60); do
    said=$("$@" || true)
    grep -qE -- "$pattern" <<<"$said" && { echo "  $said"; return; }
    sleep 0.5
  done
  fail "not '$pattern' from '$*', but: $said"
}
event() { # event SERVICE WHAT SINCE: when it first happened, in nanoseconds
  docker events --since "$3" --until "$(date +%s)" --filter "event=$2" --filter "container=$(docker compose ps -aq "$1")" \
    --format '{{.TimeNano}}' | head -1
}
state() { docker inspect -f "{{.State.$2}}" "$(docker compose ps -aq "$1")"; }

echo "the files are in order"
docker compose config --quiet
COMPOSE_PROFILES=gpu docker compose config --quiet

echo "up"
timeout "$most_s" docker compose up --detach --wait --quiet-pull >/dev/null 2>&1 || fail "it did not come up in $most_s s"
echo "  after $((SECONDS - started)) s"

echo "requests"
send first 20 60 || fail "not all requests were completed"
[ $((SECONDS - started)) -le "$most_s" ] || fail "answers only after $((SECONDS - started)) s"
echo "  first answers after $((SECONDS - started)) s"

echo "requests by submit, as the docs say"
for n in $(seq 5); do
  echo '{"request_id": "submitted-'"$n"'", "payload": {"messages": [{"role": "user", "content": "Say '"$n"' again"}]}}'
done >"$room/requests.jsonl"
one_off laptop-worker submit <"$room/requests.jsonl" >"$room/results.jsonl" || fail "submit: $(cat "$room/results.jsonl")"
python3 - "$room/results.jsonl" <<'PY' || fail "submit: $(cat "$room/results.jsonl")"
import json, sys
results = [json.loads(line) for line in open(sys.argv[1])]
assert [result["request_id"] for result in results] == [f"submitted-{n}" for n in range(1, 6)]
assert all(result["status"] == "completed" for result in results)
PY
echo "  5 of 5 completed"
sent=25

echo "check"
docker compose exec -T laptop-worker inference-worker check || fail "check"

echo "what is reported"
until_says "\"distinct\": $sent," ask billing 8082
until_says "\"ack\": $sent\b" ask metric-server 8081

echo "the worker"
address=$(docker compose port laptop-worker 9090)
fetch() { python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())' "http://$address$1"; }
grep -q '"ready":true' <<<"$(fetch /readyz)" || fail "not ready"
grep -q "^inference_worker_results_total.*completed.* $sent\.0" <<<"$(fetch /metrics)" || fail "the metrics do not tell of $sent answers"
[ "$(docker inspect -f '{{.HostConfig.ReadonlyRootfs}}' "$(docker compose ps -q laptop-worker)")" = true ] || fail "the worker's files can be written"
[ "$(docker compose exec -T laptop-worker id -u)" = 10001 ] || fail "the worker is not user 10001"

echo "stop, while requests run"
send slow 4 0 '{"delay_s": 6}'
until_says '"in_flight":4' fetch /status
from=$SECONDS since=$(date +%s)
timeout 60 docker compose stop >/dev/null 2>&1 || fail "stop took longer than a minute"
echo "  after $((SECONDS - from)) s"
[ "$(state laptop-worker ExitCode)" = 0 ] || fail "the worker ended with $(state laptop-worker ExitCode)"
[ "$(state mock-model ExitCode)" = 0 ] || fail "the model ended with $(state mock-model ExitCode)"
worker_ended=$(event laptop-worker die "$since") model_told=$(event mock-model kill "$since")
[ "$worker_ended" -lt "$model_told" ] || fail "the model was told to stop before the worker had ended"

echo "and on again"
timeout 120 docker compose up --detach --wait >/dev/null 2>&1 || fail "it did not come up again"
send slow 4 0 sent | grep -q '4 of 4' || fail "requests that ran at the stop have no answer"
send again 3 60 || fail "no answers after the second start"

echo "down"
timeout 120 docker compose down --volumes >/dev/null 2>&1 || fail "down"
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || fail "containers are left"
[ -z "$(docker volume ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || fail "volumes are left"
echo "the laptop profile works, $((SECONDS - started)) s in all"
