#!/usr/bin/env bash
# The API by hand, in JSON. Start a service whose tensors are small enough to type:
#
#   attnd serve --pool.num-layers 1 --pool.num-kv-heads 1 --pool.head-dim 2 --pool.dtype fp32
#
# then: examples/curl.sh [http://127.0.0.1:8080], or ATTND_SOCKET=/path examples/curl.sh
set -euo pipefail
base=${1:-http://127.0.0.1:8080}
socket=${ATTND_SOCKET:+--unix-socket $ATTND_SOCKET}

call() { # METHOD PATH [JSON]: print the request's line and the answer
  echo "$1 $2"
  # shellcheck disable=SC2086
  curl --silent --show-error $socket -X "$1" "$base$2" \
    ${3:+-H 'content-type: application/json' --data "$3"}
  echo
}

call GET /health/ready

# a prompt of three tokens: k and v are [3 tokens, 1 head, 2 dimensions]
call POST /v1/sequences '{"sequences": [{"id": "prompt"}]}'
call POST /v1/append '{
  "layer": 0, "sequences": ["prompt"], "append_indptr": [0, 3], "offsets": [0],
  "tensors": {
    "k": {"dtype": "F32", "shape": [3, 1, 2], "data": [1, 0, 0, 1, 1, 1]},
    "v": {"dtype": "F32", "shape": [3, 1, 2], "data": [1, 2, 3, 4, 5, 6]}}}'

# two continuations that share it, and one query each
call POST /v1/sequences '{"sequences": [{"id": "a", "parent": "prompt"}, {"id": "b", "parent": "prompt"}]}'
call POST /v1/decode '{
  "layer": 0, "sequences": ["a", "b"],
  "tensors": {"q": {"dtype": "F32", "shape": [2, 1, 2], "data": [1, 0, 0, 1]}}}'

# the page table that a kernel would get
call POST /v1/page-table '{"sequences": ["a", "b"]}'

# two states over different keys, merged (here: equal weights, so the mean)
call POST /v1/merge '{
  "lse_base": "e",
  "tensors": {
    "o": {"dtype": "F32", "shape": [1, 2, 1, 2], "data": [1, 2, 3, 4]},
    "lse": {"dtype": "F32", "shape": [1, 2, 1], "data": [0.5, 0.5]}}}'

# a wrong offset: the answer has the true length, and nothing changes
call POST /v1/append '{
  "layer": 0, "sequences": ["prompt"], "offsets": [7],
  "tensors": {
    "k": {"dtype": "F32", "shape": [1, 1, 2], "data": [0, 0]},
    "v": {"dtype": "F32", "shape": [1, 1, 2], "data": [0, 0]}}}'

for sequence in a b prompt; do
  call DELETE "/v1/sequences/$sequence"
done
call GET /v1/pool
