#!/usr/bin/env bash
# Brings deploy/compose-process up, puts requests into its queues, stops the process while they run, and takes it away.
#   deploy/test-compose-process.sh [IMAGE]
set -euo pipefail
cd "$(dirname "$0")/compose-process"
export COMPOSE_PROJECT_NAME=inference-process-test-$$ SIDECAR_IMAGE=${1:-inference-worker:test} PROCESS_PUBLISH=127.0.0.1:0
started=$SECONDS
most_s=150 # for all of it

fail() { # say what is wrong, and what the services said
  echo "FAILED: $*" >&2
  docker compose ps -a >&2 || true
  docker compose logs --no-color --tail 30 process model >&2 || true
  exit 1
}
cleanup() {
  timeout 60 docker compose --profile ask down --volumes --timeout 2 >/dev/null 2>&1 || true
  rm -rf "$room"
}
trap cleanup EXIT
room=$(mktemp -d)

echo "the file is in order, and the process comes up"
docker compose --profile ask config --quiet
timeout "$most_s" docker compose up --detach --wait --quiet-pull >"$room/up" 2>&1 || fail "it did not come up: $(tail -3 "$room/up")"
echo "  after $((SECONDS - started)) s"

echo "requests through both queues"
timeout 60 docker compose run --rm -T ask 10 >"$room/answers" 2>"$room/ask" || fail "not answered: $(tail -3 "$room/ask")"
[ "$(grep -c '^200 chat' "$room/answers")" = 5 ] && [ "$(grep -c '^200 reports' "$room/answers")" = 5 ] ||
  fail "other answers: $(cat "$room/answers")"
metrics=$(curl -sS "http://$(docker compose port process 9090)/metrics") || fail "no metrics"
for queue in chat reports; do
  grep -q "^llm_d_async_async_successful_requests_total{.*queue_name=\"$queue\".*} 5" <<<"$metrics" || fail "not counted: $queue"
done

echo "check"
flags=$(docker compose config --format json | python3 -c 'import json, sys
print(*json.load(sys.stdin)["services"]["process"]["command"][1:])')
# shellcheck disable=SC2086 # Several words.
docker compose exec -T process inference-worker check process $flags >"$room/check" || fail "check: $(cat "$room/check")"
grep -q 'endpoint-scrape' "$room/check" || fail "the gate is not shown: $(cat "$room/check")"

echo "it is stopped while requests run, and goes on after that"
timeout 80 docker compose run --rm -T ask 40 >"$room/answers" 2>"$room/ask" &
asking=$!
for _ in $(seq 100); do
  [ "$(docker compose exec -T redis redis-cli LLEN result-list)" != 0 ] && break
  [ "$(docker compose exec -T redis redis-cli ZCARD chat)" != 0 ] && break
  sleep 0.2
done
timeout 45 docker compose stop process >/dev/null 2>&1 || fail "it did not stop"
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(docker compose ps -aq process)")" = 0 ] || fail "it did not end well"
docker compose start process >/dev/null 2>&1 || fail "it did not start"
wait "$asking" || fail "not answered: $(tail -3 "$room/ask")"
[ "$(grep -c '^200 ' "$room/answers")" = 40 ] || fail "not all were answered: $(sort "$room/answers" | uniq -c | sort -rn | head -3)"
[ "$(docker compose exec -T redis redis-cli EXISTS chat reports chat:claimed reports:claimed chat:dead reports:dead)" = 0 ] ||
  fail "something is left in the queues"

echo "down"
timeout 60 docker compose --profile ask down --volumes >/dev/null 2>&1 || fail "down"
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || fail "containers are left"
took=$((SECONDS - started))
[ "$took" -le "$most_s" ] || fail "it took $took s"
echo "many queues work, $took s in all"
