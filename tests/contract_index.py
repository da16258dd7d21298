"""The contract sentence by sentence, each with the tests that prove it: a page for reviewers, held true by a unit test.

The contract is what a user, a producer and a dashboard may rely on. Sentences are quoted, long ones shortened. `later`
marks a sentence about a command that this index does not cover: it is of another part, or not built yet. The tests
named are those that are about the sentence; many others touch it.

Not here: whether the tests pass. `tests/unit/test_contract_index.py` looks that each is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Sentence:
    """One promise."""

    said: str
    proved_by: tuple[str, ...] = ()
    """Below `tests/`: file::name, or file::class::name; parametrised tests without their ids."""
    later: str = ""
    """The command that it is about, where no test is named."""


def proved(said: str, *tests: str) -> Sentence:
    return Sentence(said, proved_by=tests)


def later(said: str, command: str) -> Sentence:
    return Sentence(said, later=command)


COMMANDS: Final = (
    proved(
        "one console script `inference-worker` (also `python -m inference_worker`; with no command it is `run`)",
        "integration/test_environment.py::test_with_no_command_it_is_run",
    ),
    proved(
        "`run`: the sidecar worker of one model replica, configured by environment variables alone",
        "integration/test_smoke.py::test_requests_are_answered_billed_and_reported",
        "integration/test_llamacpp.py::test_llama_cpp_answers_through_the_queue_streamed_and_not",
        "unit/test_settings.py::test_the_environment_of_the_process_is_not_read",
    ),
    proved(
        "`dev`: the whole system in one process with nothing to install; the main job on a fresh machine",
        "integration/test_dev.py::test_a_newcomer_sees_answers_and_can_do_what_is_printed",
        "integration/test_dev.py::test_a_failed_job_is_shown_as_failed_with_its_reason",
        "integration/test_dev.py::test_on_a_terminal_there_is_a_live_view_and_warnings_stand_above_it",
    ),
    proved(
        "`dev`: mock model, or `MODEL_CONTAINER_URL`",
        "integration/test_dev.py::test_the_users_own_model_is_called_by_its_own_name",
        "integration/test_dev.py::test_it_says_that_it_waits_for_the_users_own_model_and_jobs_wait_in_the_queue",
        "integration/test_dev.py::test_a_model_that_comes_late_is_asked_for_its_name_then",
    ),
    proved(
        "`dev`: embedded queue and result store, or those that the environment names",
        "integration/test_dev.py::test_real_servers_take_the_place_of_the_embedded_ones_each_by_itself",
        "unit/test_settings.py::test_dev_uses_what_is_given",
    ),
    proved(
        "`mock-model`: an OpenAI-compatible model server with latency, token rate, streaming and fault knobs",
        "integration/test_mock_model_command.py::test_it_needs_no_variable_and_answers_as_openai_does",
        "integration/test_mock_model_command.py::test_latency_and_token_rate_are_knobs",
        "integration/test_mock_model_command.py::test_faults_are_knobs_of_the_command_and_over_http",
        "integration/test_mock_model_command.py::test_a_worker_retries_over_a_fault_of_the_mock",
        "integration/test_model_client.py::test_the_faults_of_the_mock_are_what_they_say",
    ),
    proved(
        "Each command asks only for the variables that it uses; `dev` brings its own identity and sinks",
        "unit/test_settings.py::test_dev_brings_everything",
        "unit/test_settings.py::test_dev_with_a_metric_server_needs_its_token",
        "unit/test_settings.py::test_a_client_needs_the_deployment_alone",
        "integration/test_mock_model_command.py::test_it_needs_no_variable_and_answers_as_openai_does",
    ),
    proved(
        "0 after a stop that was asked for, hand-backs included, at most 10 s after the grace",
        "integration/test_configuration.py::test_a_stop_while_no_neighbour_is_there_is_0",
        "integration/test_configuration.py::test_a_stop_that_hands_requests_back_is_0_and_in_time",
        "integration/test_kills.py::test_a_stop_ends_in_time_whatever_hangs",
        "integration/test_dev.py::test_sigterm_lets_what_runs_end",
    ),
    proved(
        "2 for a configuration error, one line for every variable that is missing or wrong, all of them at once",
        "integration/test_configuration.py::test_every_missing_variable_has_its_line_at_once",
        "integration/test_configuration.py::test_every_wrong_variable_has_its_line_at_once_and_no_secret_is_printed",
        "unit/test_settings.py::test_missing_and_wrong_come_together",
        "integration/test_mock_model_command.py::test_a_fault_that_is_none_is_told_with_the_fields_there_are",
    ),
    proved(
        "secrets never printed",
        "integration/test_configuration.py::test_a_secret_that_is_wrong_is_named_and_not_shown",
        "unit/test_settings.py::test_nothing_secret_is_printed",
        "unit/test_logs.py::test_the_drivers_say_what_we_do_not",
    ),
    proved(
        "1 for anything else",
        "integration/test_configuration.py::test_a_port_in_use_ends_the_process_with_1_and_says_so",
        "integration/test_dev.py::test_a_port_that_was_named_and_is_taken_ends_it_with_one_line",
    ),
    proved(
        "`check` validates the configuration, reaches every neighbour, prints a table; exit 0, 1 or 2",
        "integration/test_check.py::test_where_all_is_reached_it_says_what_was_seen",
        "integration/test_check.py::test_a_table_is_what_people_get",
        "integration/test_check.py::test_nothing_is_reached",
        "integration/test_check.py::test_every_wrong_variable_is_exit_code_2_with_a_line_of_its_own",
    ),
    proved(
        "`submit` sends one request or a JSONL file, waits for the results, progress bar, results as JSONL",
        "integration/test_submit.py::test_one_prompt_is_answered_on_stdout",
        "integration/test_submit.py::test_a_file_of_all_kinds_of_lines_is_answered_in_its_order",
        "integration/test_submit.py::test_on_a_terminal_there_is_a_bar_with_rate_and_time_left",
    ),
    proved(
        "`dlq list, show, replay, purge`: why, when, how often tried; replay one, some, all",
        "integration/test_dlq.py::test_the_list_says_why_when_how_often_and_with_which_status",
        "integration/test_dlq.py::test_one_letter_is_shown_whole",
        "integration/test_dlq.py::test_a_replayed_letter_is_run_as_new",
        "integration/test_dlq.py::test_a_purge_removes_what_was_chosen_and_nothing_else",
    ),
    proved(
        "`submit` reaches a `dev` by `--url`, otherwise the broker and Redis (`dlq --url` comes with the gateway)",
        "integration/test_submit.py::test_over_http_it_is_the_same",
        "integration/test_submit.py::test_dev_is_reached_by_its_url",
    ),
    proved(
        "`gateway`: HTTP intake",
        "integration/test_gateway.py::test_a_job_that_came_before_the_first_worker_is_run_by_it",
        "integration/test_gateway.py::test_two_gateways_know_the_same_jobs",
        "integration/test_gateway.py::test_sigterm_lets_those_who_wait_go_with_what_is_known",
        "integration/test_openai_client.py::test_chat_whole_and_streamed",
        "integration/test_schemathesis.py::test_every_answer_is_one_that_the_document_describes",
    ),
    proved(
        "`scaler`: the scale signal",
        "integration/test_scaler.py::test_the_command_runs_until_it_is_told_to_stop",
        "integration/test_scaler.py::test_while_the_broker_cannot_be_seen_it_says_503_and_wants_nothing",
        "unit/test_scale_view.py::test_keda_finds_a_number_at_every_documented_path",
    ),
    proved(
        "`process`: many queues, gates, pools, tiers",
        "integration/test_many_queues_page.py::test_the_quick_start_answers_as_it_says",
        "integration/test_many_queues_page.py::test_the_permissions_that_the_docs_name_are_enough",
        "integration/test_check_process.py::test_it_says_of_each_gate_when_it_closes_and_what_it_reads",
        "integration/test_sorted_set_dead_letters.py::test_a_dead_request_is_put_back_once_as_a_new_submission_and_ends_with_a_result",
    ),
)

ENVIRONMENT: Final = (
    proved(
        "All variables of the first source's table, with its defaults; the ones it calls required are required",
        "unit/test_settings.py::test_the_defaults_are_the_sources",
        "unit/test_settings.py::test_every_missing_variable_has_its_line",
        "integration/test_configuration.py::test_every_missing_variable_has_its_line_at_once",
    ),
    proved(
        "`RABBITMQ_URL` wins over host, port, user, password, vhost",
        "unit/test_settings.py::test_a_broker_url_wins_and_always_has_a_heartbeat",
        "integration/test_environment.py::test_the_broker_can_be_named_by_its_parts",
        "unit/test_settings.py::test_the_broker_url_is_built_with_everything_encoded",
    ),
    proved(
        "`RABBITMQ_QUEUE_TYPE`, `RABBITMQ_DELIVERY_LIMIT`: used when the queue is first declared",
        "integration/test_rabbitmq_rules.py::test_the_topology_is_declared",
    ),
    proved(
        "`CLAIM_LEASE_S`: how long a request stays its runner's when the runner is silent",
        "integration/test_table5.py::test_a_request_whose_runner_died_runs_when_its_lease_has_lapsed",
        "unit/test_message_processor.py::test_a_lease_is_renewed_over_a_long_call",
    ),
    proved(
        "`INFERENCE_MAX_CRASHES`: failed (500) and dead-lettered, on any queue type",
        "integration/test_table5.py::test_a_request_whose_runners_died_too_often_is_poison",
        "integration/test_table5.py::test_one_death_below_the_limit_runs",
        "integration/test_broker_faults.py::test_a_request_that_kills_its_workers_ends_as_poison_and_takes_nobody_along",
    ),
    proved(
        "`RABBITMQ_RETRY_DELAY_S`: doubling, with equal jitter (half to whole), capped at 30 s and at the deadline",
        "integration/test_rabbitmq_rules.py::test_a_retry_is_hidden_for_half_to_the_whole_delay",
        "integration/test_rabbitmq_rules.py::test_a_short_delay_does_not_wait_behind_a_long_one",
        "integration/test_rabbitmq_rules.py::test_a_retry_is_never_delayed_beyond_the_deadline",
        "unit/test_disposition.py::TestDelay::test_lies_between_half_and_the_whole",
        "unit/test_disposition.py::TestDelay::test_is_0_or_a_rung_and_never_beyond_the_deadline",
    ),
    proved("… 0 = at once", "integration/test_rabbitmq_rules.py::test_without_a_delay_a_retry_is_at_once"),
    proved(
        "`MODEL_HEALTH_PATH`; `MODEL_API_KEY`, sent as a bearer token",
        "integration/test_health_and_suspension.py::test_the_health_path_and_the_key_are_used",
        "integration/test_model_client.py::test_a_request_goes_out_as_it_came_with_its_id_and_key",
    ),
    proved(
        "`MODEL_RETRY_STATUS_CODES`: treated as temporary; `Retry-After` is honoured within the deadline",
        "integration/test_table5.py::test_a_failure_that_may_pass_is_tried_again",
        "integration/test_table5.py::test_retry_after_is_honoured",
        "integration/test_table5.py::test_retry_after_beyond_the_deadline_leaves_room_for_one_more_try",
    ),
    proved(
        "`MODEL_MAX_RESPONSE_BYTES`: a larger body is a failed result (502), never an out-of-memory kill",
        "integration/test_table5.py::test_an_answer_that_cannot_be_stored_is_failed_502",
        "integration/test_table5.py::test_an_answer_just_within_the_limit_is_completed",
        "integration/test_memory.py::test_large_answers_beyond_the_budget_wait_for_each_other",
    ),
    proved(
        "`HEALTH_FAILURE_THRESHOLD`: time-outs in a row; a refused connection or a non-2xx does at once",
        "integration/test_health_and_suspension.py::test_time_outs_suspend_only_in_a_row",
        "unit/test_health_checker.py::test_a_definite_no_makes_it_unhealthy_at_once",
    ),
    proved(
        "`METRICS_MODEL_TTFT_HEADER`, `…_TBT_HEADER`: believed when the worker has not measured itself",
        "integration/test_model_client.py::test_times_come_from_headers_where_they_can_be_read",
        "integration/test_model_client.py::test_the_names_of_the_headers_can_be_chosen",
        "integration/test_rabbitmq_rules.py::test_what_a_result_says_of_its_times",
    ),
    proved(
        "`SHUTDOWN_GRACE_S`: how long in-flight requests may finish after SIGTERM",
        "integration/test_table5.py::test_a_request_that_ends_within_the_grace_is_answered",
        "integration/test_table5.py::test_a_request_that_does_not_end_within_the_grace_is_requeued_uncounted",
    ),
    proved(
        "`WORKER_HTTP_PORT`: `/livez`, `/readyz`, `/healthz`, `/metrics`, `/status`; 0 = off",
        "integration/test_health_and_suspension.py::test_the_status_and_the_metrics_tell_the_state",
        "unit/test_ops_server.py::test_a_live_worker_is_alive_whatever_its_neighbours_do",
        "integration/test_environment.py::test_without_a_port_there_is_no_ops_port",
    ),
    proved(
        "`LOG_LEVEL`, `LOG_FORMAT`: `json` or `console`",
        "integration/test_environment.py::test_the_log_is_json_unless_told_otherwise",
        "integration/test_environment.py::test_the_log_can_be_for_people",
        "integration/test_environment.py::test_the_least_level_that_is_written_can_be_chosen",
    ),
    proved(
        "Secrets and URLs also have an `_FILE` twin; a trailing newline in the file is dropped",
        "integration/test_configuration.py::test_urls_and_keys_come_from_files",
        "unit/test_settings.py::test_a_file_is_read_less_one_newline",
        "unit/test_settings.py::test_other_variables_have_no_file_twin",
    ),
    proved(
        "… read again at each reconnect",
        "integration/test_health_and_suspension.py::test_refused_credentials_are_tried_for_ever_and_read_again",
        "integration/test_environment.py::test_the_brokers_password_is_read_again_at_each_try",
        "integration/test_environment.py::test_the_stores_url_and_password_are_read_again_at_each_try",
        "integration/test_environment.py::test_the_models_url_and_key_are_read_again",
        "integration/test_environment.py::test_the_metric_servers_url_and_token_are_read_again",
        "integration/test_environment.py::test_the_billing_servers_url_is_read_again",
        "integration/test_environment.py::test_the_addresses_of_exporters_are_read_again",
        "unit/test_settings.py::test_every_part_reads_its_files_again",
    ),
    proved(
        "both set is a configuration error",
        "integration/test_configuration.py::test_a_value_and_its_file_together_are_an_error",
    ),
    proved(
        "An empty value means unset",
        "unit/test_settings.py::test_an_empty_value_is_unset_and_white_space_around_is_dropped",
        "unit/test_settings.py::test_an_empty_required_variable_is_missing",
        "unit/test_settings.py::test_an_empty_file_is_unset",
    ),
    proved(
        "Secrets are every password, token and key, and the user part of a URL",
        "unit/test_settings.py::test_nothing_secret_is_printed",
        "unit/test_settings.py::test_an_address_may_be_logged",
    ),
    proved(
        "Seconds may be fractions",
        "unit/test_settings.py::test_seconds_may_be_fractions_and_whole_seconds_are_rounded_up",
    ),
    proved(
        "With a sink `off`, its other variables are not required; `off` switches a sink off on purpose",
        "integration/test_configuration.py::test_a_sink_that_is_off_asks_for_nothing",
        "unit/test_settings.py::test_a_sink_that_is_off_needs_nothing_else",
        "integration/test_sinks.py::test_with_billing_off_nothing_is_kept",
        "unit/test_metrics_reporter.py::test_with_the_sink_off_nothing_is_sent_nor_lost_and_the_load_is_still_seen",
    ),
    proved(
        "`VLLM_METRICS_URL` is `MODEL_CONTAINER_URL` + `/metrics` unless set",
        "integration/test_reports.py::test_the_models_own_metrics_are_passed_on",
        "integration/test_environment.py::test_the_addresses_of_exporters_are_read_again",
    ),
    proved(
        "`REDIS_PASSWORD` is used where the URL has none",
        "unit/test_settings.py::test_the_redis_password_is_used_where_the_url_has_none",
        "integration/test_environment.py::test_the_stores_url_and_password_are_read_again_at_each_try",
    ),
    proved(
        "The ops port binds all interfaces (`WORKER_HTTP_HOST`)",
        "integration/test_environment.py::test_the_ops_port_is_there_for_all_interfaces",
    ),
    proved(
        "TLS: `amqps://`, `rediss://`, `https://` with `TLS_CA_FILE`, `TLS_CERT_FILE`, `TLS_KEY_FILE`",
        "integration/test_tls.py::test_every_neighbour_is_reached_over_tls",
        "integration/test_tls.py::test_every_neighbour_is_shown_our_certificate_where_it_asks",
        "integration/test_tls.py::test_a_neighbour_of_an_unknown_authority_is_not_believed",
        "integration/test_tls.py::test_without_the_certificate_that_a_neighbour_asks_for_it_is_tried_again",
        "unit/test_settings.py::test_a_certificate_and_its_key_come_together",
        "unit/test_settings.py::test_tls_files_are_tried_at_the_start",
    ),
    proved(
        "`RABBITMQ_PREFETCH` is 1 to 65535; 0 is an error",
        "unit/test_settings.py::test_a_wrong_value_is_refused_in_words",
        "integration/test_configuration.py::test_every_wrong_variable_has_its_line_at_once_and_no_secret_is_printed",
    ),
    proved(
        "`IWL_CLAIM_IDLE_MS` in the place of `CLAIM_LEASE_S`",
        "unit/test_settings.py::test_over_streams_its_own_variables_say_how_many_how_long_and_how_often",
        "integration/test_redis_streams_faults.py::test_what_is_held_for_many_leases_stays_its_holders",
    ),
)

RABBITMQ: Final = (
    proved(
        "Queue `infer_req.<DEPLOYMENT_ID>`: durable, dead-letters to `INFERENCE_DLX`, bound to `INFERENCE_DLQ`",
        "integration/test_rabbitmq_rules.py::test_the_topology_is_declared",
    ),
    proved(
        "Quorum arguments: `x-delivery-limit`, `x-dead-letter-strategy`, `x-overflow: reject-publish`",
        "integration/test_rabbitmq_rules.py::test_the_topology_is_declared",
        "integration/test_rabbitmq_rules.py::test_a_copy_that_the_broker_refuses_is_tried_again",
    ),
    proved(
        "Declared at every (re)connect",
        "integration/test_rabbitmq_rules.py::test_what_was_deleted_is_declared_again",
        "integration/test_broker_faults.py::test_a_deleted_queue_is_declared_anew_and_consumed",
    ),
    proved(
        "Where the queue exists with other arguments, the worker says so in one warning and uses the queue as it is",
        "integration/test_rabbitmq_rules.py::test_a_queue_in_another_form_is_used_as_it_is_and_said_once",
    ),
    proved(
        "declaring has a channel of its own",
        "integration/test_broker_faults.py::test_a_missing_dead_letter_exchange_is_declared_anew_and_disturbs_nobody",
        "integration/test_broker_faults.py::test_retries_and_suspensions_leak_no_channel_and_no_connection",
    ),
    proved(
        "it never deletes or redeclares a user's queue",
        "integration/test_rabbitmq_rules.py::test_an_exchange_and_a_dead_letter_queue_in_another_form_are_used_too",
        "integration/test_rabbitmq_rules.py::test_messages_of_a_queue_that_was_there_before_the_worker_are_answered",
    ),
    proved(
        "On such a queue the worker publishes dead letters itself, confirmed, then acks",
        "integration/test_rabbitmq_rules.py::test_on_such_a_queue_dead_letters_are_published_and_confirmed_then_acked",
        "integration/test_rabbitmq_rules.py::test_a_dead_letter_that_comes_back_is_published_again_after_declaring_anew",
    ),
    proved(
        "`INFERENCE_DLQ` is of the queue's type; where quorum, with `x-delivery-limit` 1000000000",
        "integration/test_rabbitmq_rules.py::test_the_topology_is_declared",
    ),
    proved(
        "One consumer per worker, manual ack, prefetch = most requests in flight; the connection's name",
        "integration/test_rabbitmq_rules.py::test_one_named_consumer_with_manual_acks_and_the_prefetch",
        "integration/test_broker_faults.py::test_after_each_of_five_losses_the_queue_has_one_consumer_and_everything_is_answered",
        "unit/test_listener.py::test_no_more_messages_are_in_hand_than_the_limit",
    ),
    proved(
        "Message body: UTF-8 JSON with four fields, and optionally `endpoint`, `metadata`, `tenant`",
        "unit/test_messages.py::TestDecode::test_reads_what_was_written",
        "unit/test_messages.py::TestDecode::test_what_need_not_be_said_is_left_out",
        "integration/test_rabbitmq_rules.py::test_the_endpoints_that_a_request_may_name",
        "integration/test_table5.py::test_every_endpoint_is_completed_and_billed",
    ),
    proved(
        "Deadline = min(`received_at`, now + 60 s) + min(`timeout_s`, 30 days)",
        "unit/test_messages.py::TestDecode::test_the_deadline",
        "integration/test_rabbitmq_rules.py::test_the_deadline_is_bounded",
    ),
    proved(
        "Unknown fields are ignored",
        "unit/test_messages.py::TestDecode::test_unknown_fields_are_ignored",
        "integration/test_table5.py::test_what_is_the_models_to_judge_goes_to_the_model",
    ),
    proved(
        "A usable `request_id` is 1–512 bytes of UTF-8 without control characters",
        "integration/test_table5.py::test_an_odd_id_that_is_usable_is_used",
        "unit/test_messages.py::TestUsableId::test_every_text_of_1_to_512_bytes_without_control_characters",
    ),
    proved(
        "The payload reaches the model as the bytes that came, except `stream_options.include_usage` of a stream",
        "integration/test_rabbitmq_rules.py::test_the_payload_reaches_the_model_as_it_came",
        "unit/test_messages.py::TestDecode::test_a_payload_that_has_its_say_is_left_as_it_came",
    ),
    proved(
        'a payload with `"stream": true`: read to its end, stored in the shape of the unstreamed answer',
        "integration/test_table5.py::test_a_stream_is_completed_in_the_shape_of_the_unstreamed_answer",
        "integration/test_model_client.py::test_a_stream_is_stored_as_the_unstreamed_answer",
    ),
    proved(
        "(every choice, tool calls, logprobs, usage)",
        "unit/test_event_stream.py::test_every_choice_and_its_logprobs_are_kept",
        "unit/test_event_stream.py::test_streamed_tool_calls_are_the_unstreamed_ones",
        "unit/test_event_stream.py::test_a_streamed_chat_has_the_shape_of_the_unstreamed_one",
    ),
    proved(
        "AMQP properties that were set are kept over a retry, headers included, and `x-retry-count` is changed",
        "integration/test_rabbitmq_rules.py::test_a_copy_keeps_every_property_that_was_set",
        "integration/test_rabbitmq_rules.py::test_a_copy_of_a_message_without_properties_has_the_count_alone",
    ),
    proved(
        "What the broker wrote or would act on again is left out of copies",
        "integration/test_rabbitmq_rules.py::test_a_copy_has_nothing_that_the_broker_wrote",
    ),
    proved(
        "a delayed copy has no `expiration`",
        "integration/test_rabbitmq_rules.py::test_a_delayed_copy_has_no_expiration",
    ),
    proved(
        "`x-retry-count` is an integer of any AMQP width, 0 or more, at most 2³¹−1",
        "integration/test_rabbitmq_rules.py::test_a_retry_count_is_read_in_every_width",
        "integration/test_rabbitmq_rules.py::test_a_retry_count_within_its_bounds_is_believed",
    ),
    proved(
        "… anything else counts as 0, with a warning",
        "integration/test_rabbitmq_rules.py::test_a_retry_count_that_is_none_counts_as_0_with_a_warning",
    ),
    proved(
        "A copy is tried for at most 30 s, or until the deadline; then the message is handed back",
        "integration/test_rabbitmq_rules.py::test_a_copy_that_cannot_be_placed_is_given_up_and_the_message_handed_back",
        "integration/test_rabbitmq_rules.py::test_a_copy_is_not_tried_beyond_the_deadline",
    ),
    proved(
        "A retry copy is published with `mandatory` and a confirm **before** the original is acknowledged",
        "integration/test_rabbitmq_rules.py::test_a_copy_is_mandatory_and_confirmed_before_the_ack",
        "integration/test_rabbitmq_rules.py::test_a_copy_without_a_confirm_is_published_again",
    ),
    proved(
        "One that comes back unroutable is published again after the topology has been declared anew",
        "integration/test_rabbitmq_rules.py::test_an_unroutable_copy_is_published_again_after_declaring_anew",
    ),
    proved(
        "… and of replays is left out what the broker wrote",
        "integration/test_dlq.py::test_a_copy_has_the_properties_of_its_letter_less_what_the_broker_wrote",
    ),
)

RESULTS: Final = (
    proved(
        "`SET infer_resp:<request_id> <json> EX REDIS_RESPONSE_TTL_S`",
        "integration/test_rabbitmq_rules.py::test_a_result_lives_for_its_ttl",
        "integration/test_redis_store.py::test_the_result_ends_with_its_time_and_the_claim_with_the_result",
    ),
    proved(
        "then `PUBLISH infer_resp:<request_id>` with `completed` or `failed`",
        "integration/test_rabbitmq_rules.py::test_the_end_is_published_when_the_result_is_there",
        "integration/test_redis_store.py::test_the_end_of_a_request_is_announced_once",
    ),
    proved(
        "the JSON of a completed and of a failed result; the added keys always after those",
        "unit/test_messages.py::TestReply::test_a_completed_one_has_the_keys_of_the_source_first",
        "unit/test_messages.py::TestReply::test_a_failed_one_says_why",
        "integration/test_table5.py::test_a_2xx_with_complete_json_or_nothing_is_completed",
        "integration/test_table5.py::test_a_models_error_is_the_result",
    ),
    proved(
        "`request_id`, `attempt`, `replica_id`, `received_at`, `finished_at`, `timings`",
        "integration/test_rabbitmq_rules.py::test_what_a_result_says_of_its_times",
        "integration/test_table5.py::test_a_failure_that_may_pass_is_tried_again",
    ),
    proved(
        "`error_code` on failures: eight names",
        "integration/test_table5.py::test_a_request_with_a_wrong_field_is_answered_under_its_request_id",
        "integration/test_table5.py::test_an_expired_request_is_failed_408_and_acknowledged",
        "integration/test_table5.py::test_a_deadline_while_the_model_works_is_failed_408_and_closes_the_call",
        "integration/test_table5.py::test_cancelling_closes_the_call_that_runs",
        "integration/test_table5.py::test_a_models_error_is_the_result",
        "integration/test_table5.py::test_an_answer_that_cannot_be_stored_is_failed_502",
        "integration/test_table5.py::test_a_failure_that_does_not_pass_uses_the_retries_up",
        "integration/test_table5.py::test_a_request_whose_runners_died_too_often_is_poison",
    ),
    proved(
        "A dead letter's reason, attempts and last status are kept for 30 days (`infer_dead:<request_id>`)",
        "integration/test_table5.py::test_a_dead_letters_history_is_kept_in_redis",
        "integration/test_table5.py::test_the_history_of_a_message_that_is_no_request_is_kept_too",
        "integration/test_redis_store.py::test_a_dead_letters_note_is_kept_for_30_days",
    ),
    proved(
        "(best effort, just before the reject)",
        "unit/test_settling.py::TestBury::test_holds_nobody_up",
        "unit/test_settling.py::TestBury::test_notes_why_and_when_and_how_often",
    ),
    proved(
        "The docs list every Redis key and command that is used (for ACL users)",
        "integration/test_dev.py::test_the_permissions_that_the_docs_name_are_enough",
        "unit/test_readme.py::test_every_redis_command_of_a_script_is_in_the_docs",
        "integration/test_redis_store.py::test_no_key_is_for_ever_but_the_outbox",
    ),
)

OUTCOMES: Final = (
    proved(
        "row 1, no request: failed 400 under `request_id`; rejected → DLQ",
        "integration/test_table5.py::test_a_request_with_a_wrong_field_is_answered_under_its_request_id",
        "unit/test_messages.py::TestDecode::test_any_fields_are_a_request_or_malformed",
        "unit/test_disposition.py::test_what_becomes_of_a_message",
    ),
    proved(
        "row 1: else under the AMQP `message_id`",
        "integration/test_table5.py::test_a_message_without_a_usable_id_is_answered_under_its_message_id",
    ),
    proved(
        "row 1: else none", "integration/test_table5.py::test_a_message_without_any_usable_id_is_only_dead_lettered"
    ),
    proved(
        "row 2, the deadline has passed on arrival, and no terminal result exists: failed 408, ack",
        "integration/test_table5.py::test_an_expired_request_is_failed_408_and_acknowledged",
        "integration/test_table5.py::test_an_expired_request_that_runs_elsewhere_is_not_failed",
    ),
    proved(
        "The first row that fits, from the top",
        "integration/test_table5.py::test_that_it_has_expired_comes_before_the_rows_below",
    ),
    proved(
        "row 3, a terminal result exists: left alone, ack; the model is not called, nothing is billed again",
        "integration/test_table5.py::test_an_answered_request_is_acknowledged",
        "integration/test_table5.py::test_a_lost_ack_costs_no_second_call_and_no_second_bill",
    ),
    proved(
        "row 3: `retries_exhausted` or `poison` and not an older attempt: rejected, since the first reject was lost",
        "integration/test_table5.py::test_a_lost_reject_is_made_good",
    ),
    proved(
        "row 4, an older attempt, whose copy the broker has confirmed: none, ack",
        "integration/test_table5.py::test_an_older_attempt_is_acknowledged_without_a_result",
        "integration/test_table5.py::test_the_attempt_at_the_floor_runs",
    ),
    proved(
        "row 5, running elsewhere: waits, unacknowledged, for the answer or for the lease to lapse, then runs it",
        "integration/test_table5.py::test_a_request_that_runs_elsewhere_waits_for_the_answer",
        "integration/test_table5.py::test_a_request_whose_runner_died_runs_when_its_lease_has_lapsed",
        "unit/test_message_processor.py::test_a_message_waits_for_another_runner_for_ten_minutes_at_most",
    ),
    proved(
        "row 5: renewed every third of it",
        "integration/test_table5.py::test_a_running_worker_renews_its_lease",
        "unit/test_message_processor.py::test_a_lease_is_renewed_over_a_long_call",
    ),
    proved(
        "row 5: in the same process it joins the call that is running",
        "integration/test_table5.py::test_in_the_same_process_it_joins_the_call_that_runs",
    ),
    proved(
        "row 6, the store cannot be asked: the model is not called; consuming pauses until Redis answers",
        "integration/test_table5.py::test_without_a_store_consuming_pauses_until_it_answers",
        "integration/test_table5.py::test_a_store_that_is_loading_its_data_is_waited_for",
    ),
    proved(
        "row 6: asked again for `REDIS_RETRY_DELAY_S`, then nack, requeue",
        "integration/test_table5.py::test_a_message_that_came_just_before_an_outage_is_handed_back",
    ),
    proved(
        "row 7, its runners died `INFERENCE_MAX_CRASHES` times: failed 500, `poison`; rejected → DLQ",
        "integration/test_table5.py::test_a_request_whose_runners_died_too_often_is_poison",
    ),
    proved(
        "row 8, cancelled by the caller: failed 499, ack; a running call is closed",
        "integration/test_table5.py::test_cancelling_closes_the_call_that_runs",
        "integration/test_table5.py::test_a_request_that_was_cancelled_while_it_was_queued_never_runs",
    ),
    proved(
        "row 9, model 2xx, complete JSON within the limit, or empty (`result` null): completed, ack",
        "integration/test_table5.py::test_a_2xx_with_complete_json_or_nothing_is_completed",
    ),
    proved(
        "row 10, model 4xx / 5xx: failed, the model's status and error message, ack",
        "integration/test_table5.py::test_a_models_error_is_the_result",
    ),
    proved(
        "row 11, 3xx, body not JSON, too large, an error event in a stream: failed 502, ack",
        "integration/test_table5.py::test_an_answer_that_cannot_be_stored_is_failed_502",
    ),
    proved(
        "row 12, reset, protocol error, cut short, time-out, retry status: copy with `x-retry-count`+1, then ack",
        "integration/test_table5.py::test_a_failure_that_may_pass_is_tried_again",
    ),
    proved(
        "row 12: connection refused, DNS: consuming is stopped where the model is gone",
        "integration/test_table5.py::test_a_refused_connection_stops_consuming_and_is_tried_again",
        "integration/test_table5.py::test_a_name_that_does_not_resolve_is_tried_again",
        "integration/test_model_client.py::test_a_name_that_nobody_has_is_gone",
    ),
    proved(
        "row 12: retries used up: failed 500, `retries_exhausted`, rejected → DLQ",
        "integration/test_table5.py::test_a_failure_that_does_not_pass_uses_the_retries_up",
        "integration/test_table5.py::test_without_retries_the_first_failure_is_the_last",
        "integration/test_broker_faults.py::test_a_message_too_large_for_its_copy_fails_for_good",
    ),
    proved(
        "row 13, deadline passed while the model was working: failed 408, ack; the call is closed",
        "integration/test_table5.py::test_a_deadline_while_the_model_works_is_failed_408_and_closes_the_call",
        "integration/test_llamacpp.py::test_a_deadline_stops_llama_cpp",
    ),
    proved(
        "row 14, Redis write failed: tried again for `REDIS_RETRY_DELAY_S`, then nack, requeue; consuming pauses",
        "integration/test_table5.py::test_an_outage_within_the_delay_costs_nothing",
        "integration/test_table5.py::test_an_answer_is_kept_and_stored_when_redis_is_back",
    ),
    proved(
        "row 14: the answer is kept (bounded) and stored before consuming resumes: no second call",
        "integration/test_table5.py::test_an_answer_is_kept_and_stored_when_redis_is_back",
        "integration/test_redis_faults.py::test_answers_that_are_ready_while_the_store_is_away_are_stored_when_it_is_back",
        "unit/test_listener.py::test_a_kept_answer_is_stored_before_anything_is_consumed_and_not_made_twice",
    ),
    proved(
        "row 15, told to stop, not finished within the grace: requeued, retry count unchanged",
        "integration/test_table5.py::test_a_request_that_does_not_end_within_the_grace_is_requeued_uncounted",
        "integration/test_table5.py::test_a_message_that_has_not_begun_is_handed_back_at_once",
        "integration/test_table5.py::test_an_answer_that_is_kept_does_not_hold_up_a_stop",
    ),
    proved(
        "row 16, worker killed: redelivered by RabbitMQ",
        "integration/test_table5.py::test_a_killed_workers_request_is_redelivered_and_runs_once_more",
    ),
    proved(
        "After refused, reset or DNS the worker first asks `/health`, suspends where it is gone, then publishes",
        "integration/test_health_and_suspension.py::test_a_model_that_is_gone_is_known_before_the_copy_is_published",
        "unit/test_message_processor.py::test_the_models_health_is_looked_at_before_the_copy_is_published",
        "integration/test_health_and_suspension.py::test_a_dead_model_does_not_burn_the_retries",
    ),
    proved(
        "(at most 5 s)",
        "unit/test_message_processor.py::test_a_look_that_never_comes_is_waited_for_no_longer_than_5_s",
    ),
    proved(
        "A failed result's `error` = `error.message`, else `message`, `detail`, 1,000 characters, the reason phrase",
        "unit/test_messages.py::test_what_a_failed_answer_says_for_itself",
        "integration/test_table5.py::test_a_models_error_is_the_result",
    ),
    proved(
        "a 4xx or 5xx keeps its status also where its body is no JSON",
        "integration/test_table5.py::test_a_models_error_is_the_result",
        "unit/test_message_processor.py::test_an_answer_is_judged",
    ),
    proved(
        "RabbitMQ or Redis unreachable: backoff for ever, one warning per change of reason, not ready",
        "integration/test_health_and_suspension.py::test_an_unreachable_broker_is_tried_for_ever_with_one_warning",
        "integration/test_health_and_suspension.py::test_an_unreachable_store_is_waited_for_with_one_warning",
        "integration/test_tls.py::test_a_neighbour_of_an_unknown_authority_is_not_believed",
        "unit/test_listener_reconnect.py::test_pauses_double_up_to_thirty_seconds",
    ),
    proved(
        "… or refusing the credentials",
        "integration/test_health_and_suspension.py::test_refused_credentials_are_tried_for_ever_and_read_again",
        "integration/test_environment.py::test_the_stores_url_and_password_are_read_again_at_each_try",
    ),
    proved(
        "Only configuration exits 2",
        "integration/test_configuration.py::test_a_stop_while_no_neighbour_is_there_is_0",
        "integration/test_broker_faults.py::test_a_worker_starts_before_everything_else",
    ),
    proved(
        "A call may be repeated on a fresh connection only where the request was provably not sent",
        "integration/test_table5.py::test_a_connection_that_the_model_had_closed_costs_no_attempt",
        "integration/test_model_client.py::test_a_pooled_connection_that_was_closed_costs_no_attempt",
        "integration/test_model_client.py::test_what_is_no_answer_is_a_failure_of_its_kind",
    ),
    proved(
        "Losing RabbitMQ does not stop running calls: their answers are stored, the redelivered message finds them",
        "integration/test_table5.py::test_losing_rabbitmq_does_not_stop_a_running_call",
        "integration/test_broker_faults.py::test_losing_the_broker_does_not_stop_running_calls",
    ),
    proved(
        "A slot is held by a running call, so that in-flight requests never exceed the prefetch",
        "integration/test_table5.py::test_a_call_whose_message_is_gone_still_holds_its_slot",
        "unit/test_listener.py::test_calls_in_flight_never_exceed_the_limit_over_a_lost_connection",
    ),
    proved(
        "A late runner may still store a *completed* result if none is there; a failure it may not store",
        "integration/test_table5.py::test_a_late_runner_may_still_store_a_success",
        "integration/test_table5.py::test_a_late_runner_may_not_store_a_failure",
    ),
    proved(
        "Invariant 1: queued, or a terminal result, or in the DLQ with its history; none is nowhere",
        "unit/test_conservation.py::test_a_kill_at_any_step_of_a_message_loses_nothing",
        "integration/test_kills.py::test_fifty_kills_at_random_instants_lose_and_double_nothing",
        "integration/test_kills.py::test_a_worker_killed_in_any_window_costs_at_most_the_calls_that_the_design_says",
    ),
    proved(
        "Invariant 2: a terminal result is never replaced, as long as it lives",
        "store_contract.py::StoreContract::test_the_first_result_wins",
        "integration/test_table5.py::test_a_malformed_repeat_of_an_answered_request_leaves_the_answer_alone",
        "integration/test_kills.py::test_a_worker_frozen_for_longer_than_its_lease_answers_once_and_bills_once",
    ),
    proved(
        "Invariant 3: one event id a request, sent at least once: distinct ids = completed requests that used tokens",
        "integration/test_kills.py::test_a_bill_that_was_sent_and_not_removed_is_sent_again_under_the_same_id",
        "integration/test_kills.py::test_fifty_kills_at_random_instants_lose_and_double_nothing",
        "unit/test_usage_events.py::test_another_attempt_on_another_replica_is_the_same_event_to_a_receiver",
    ),
    proved(
        "Invariant 4: no fault of a peer ends the process or leaves a consumer that looks alive and gets nothing",
        "integration/test_broker_faults.py::test_a_consumer_that_looks_alive_and_gets_nothing_is_replaced",
        "integration/test_broker_faults.py::test_a_half_open_link_is_noticed_by_its_heartbeats",
        "unit/test_health_checker.py::test_no_exception_ends_the_checking",
        "unit/test_billing_drainer.py::test_no_exception_ends_the_draining",
    ),
    proved(
        "Invariant 5: memory stays bounded: a total byte budget beside every count",
        "integration/test_memory.py::test_large_bodies_beyond_the_budget_wait_in_the_queue",
        "integration/test_memory.py::test_large_answers_beyond_the_budget_wait_for_each_other",
        "unit/test_metrics_buffer.py::test_the_bound_in_bytes_holds_whatever_the_ids_are",
    ),
    proved(
        "where Redis itself loses data, work may be repeated or an answer lost, but nothing hangs",
        "integration/test_redis_faults.py::test_an_emptied_store_costs_at_most_a_repeat",
        "integration/test_redis_store.py::test_a_redis_that_was_emptied_hangs_nobody",
    ),
    proved(
        "`dlq replay` removes the *failed* result, puts a confirmed copy back, takes the dead letter away",
        "integration/test_dlq.py::test_a_replayed_letter_is_run_as_new",
        "integration/test_dlq.py::test_a_completed_request_is_not_replayed",
        "integration/test_dlq.py::test_a_cut_at_any_step_of_a_replay_loses_nothing_and_it_can_be_repeated",
        "integration/test_dlq.py::test_kills_at_random_moments_of_a_replay_lose_nothing",
    ),
    proved(
        "`check` warns where `REDIS_RESPONSE_TTL_S` is shorter than the time-outs in use",
        "integration/test_check.py::test_what_is_allowed_and_not_meant_is_a_warning",
    ),
)

HEALTH: Final = (
    proved(
        "The model's `/health` is polled every `HEALTH_CHECK_INTERVAL_S`",
        "unit/test_health_checker.py::test_health_is_asked_at_every_interval",
    ),
    proved(
        "… and at once after a connection error",
        "integration/test_health_and_suspension.py::test_after_a_connection_error_the_health_is_asked_at_once",
    ),
    proved(
        "Unhealthy = refused or a non-2xx",
        "integration/test_health_and_suspension.py::test_anything_but_a_2xx_suspends_at_once_and_calls_that_run_go_on",
        "integration/test_health_and_suspension.py::test_a_model_that_loads_burns_no_message",
    ),
    proved(
        "… or `HEALTH_FAILURE_THRESHOLD` time-outs in a row",
        "integration/test_health_and_suspension.py::test_time_outs_suspend_only_in_a_row",
        "unit/test_health_checker.py::test_time_outs_count_only_in_a_row",
    ),
    proved(
        "(each the interval long, at most 5 s)",
        "unit/test_health_checker.py::test_a_time_out_is_as_long_as_the_interval_where_that_is_shorter",
        "unit/test_health_checker.py::test_a_slow_but_good_answer_is_good",
        "unit/test_health_checker.py::test_a_time_out_is_5_s_however_long_the_interval_is",
    ),
    proved(
        "Suspended = `basic.cancel` on the same channel",
        "integration/test_health_and_suspension.py::test_the_consumer_is_cancelled_and_the_connection_kept",
    ),
    proved(
        "messages stay in the queue for other replicas",
        "integration/test_health_and_suspension.py::test_while_one_is_suspended_another_replica_takes_the_messages",
    ),
    proved(
        "in-flight ones finish",
        "integration/test_health_and_suspension.py::test_anything_but_a_2xx_suspends_at_once_and_calls_that_run_go_on",
    ),
    proved(
        "Resumed on the first healthy answer; the worker starts suspended until then",
        "integration/test_health_and_suspension.py::test_the_worker_starts_suspended_until_the_first_healthy_answer",
    ),
    proved(
        "`/readyz` is 200 only while RabbitMQ and Redis answer and the model is healthy",
        "integration/test_health_and_suspension.py::test_the_ops_port_follows_every_neighbour",
    ),
    proved(
        "… and the worker is not stopping",
        "integration/test_health_and_suspension.py::test_a_stopping_worker_is_alive_and_not_ready",
    ),
    proved(
        "`/livez` depends on no peer; `/healthz` is the same as `/livez`",
        "integration/test_health_and_suspension.py::test_the_ops_port_follows_every_neighbour",
        "unit/test_ops_server.py::test_a_live_worker_is_alive_whatever_its_neighbours_do",
    ),
)

SINKS: Final = (
    proved(
        "Every `METRICS_FLUSH_INTERVAL_S`",
        "unit/test_metrics_reporter.py::test_a_flush_comes_at_every_interval_and_once_more_at_the_end",
        "unit/test_billing_drainer.py::test_events_are_sent_at_the_interval_and_forgotten_after_the_answer",
    ),
    proved("… and once more on a clean stop", "integration/test_reports.py::test_a_clean_stop_sends_what_is_there"),
    proved(
        "`POST {METRIC_SERVER_URL}/metrics`, `Authorization: Bearer …`, JSON: identity at the top, `requests[]`",
        "integration/test_reports.py::test_every_disposition_is_a_record_by_the_schema",
        "unit/test_metrics_reporter.py::test_a_batch_has_everything_that_the_contract_names",
    ),
    proved(
        "`health` (`healthy`, `checked_at`), `sent_at`",
        "integration/test_reports.py::test_the_health_in_a_batch_is_the_last_look",
    ),
    proved(
        "`model` (`kv_cache_usage` 0–1, `requests_running`, `requests_waiting`)",
        "integration/test_reports.py::test_the_models_own_metrics_are_passed_on",
        "unit/test_scraping.py::test_values_are_joined_and_missing_ones_stay_missing",
    ),
    proved(
        "`gpus[]` (from DCGM)",
        "integration/test_reports.py::test_the_gpus_are_those_of_the_exporter",
        "unit/test_scraping.py::test_mig_instances_are_devices_of_their_own",
    ),
    proved("`queue_depth` (ready messages)", "integration/test_reports.py::test_the_queue_depth_is_what_nobody_holds"),
    proved(
        "`dropped` (records lost since the last flush)",
        "integration/test_sinks.py::test_each_record_of_a_failing_metric_server_is_sent_or_counted",
        "unit/test_metrics_buffer.py::test_what_was_lost_stays_exact_over_failed_flushes",
    ),
    proved(
        "`POST {CROESUS_HOST}/events`, `application/cloudevents-batch+json`, one per completed request with tokens",
        "integration/test_reports.py::test_every_event_is_a_cloudevent_by_the_schema",
        "integration/test_sinks.py::test_only_what_was_completed_with_tokens_is_billed",
    ),
    proved(
        "`id` is made from the request id alone and `source` names the deployment, not the replica",
        "integration/test_reports.py::test_every_event_is_a_cloudevent_by_the_schema",
        "unit/test_usage_events.py::test_another_attempt_on_another_replica_is_the_same_event_to_a_receiver",
        "unit/test_usage_events.py::test_the_source_is_a_uri_whatever_the_deployment_is_called",
    ),
    proved(
        "`subject` = the message's `tenant`, else `ORG_ID`, else `USER_ID`",
        "integration/test_reports.py::test_without_tenant_and_organisation_the_user_is_billed",
        "unit/test_usage_events.py::test_the_subject_is_never_empty",
    ),
    proved(
        "OpenMeter must be able to ingest the event unchanged",
        "unit/test_usage_events.py::test_an_event_is_a_cloudevent_with_the_fields_of_the_contract",
        "unit/test_usage_events.py::test_what_was_not_measured_is_0_as_a_meter_sums_it",
    ),
    proved(
        "a failed flush is logged once and dropped, the buffer is bounded",
        "unit/test_metrics_reporter.py::test_a_failure_is_told_once_and_so_is_the_recovery",
        "unit/test_metrics_buffer.py::test_a_full_buffer_keeps_the_latest_and_counts_the_rest",
    ),
    proved(
        "request processing never waits for it",
        "unit/test_metrics_reporter.py::test_adding_never_waits_for_a_sink_that_hangs",
        "integration/test_sinks.py::test_each_record_of_a_failing_metric_server_is_sent_or_counted",
    ),
    proved(
        "the usage event is stored in Redis in the same step as the result and leaves at least once, over a crash",
        "integration/test_kills.py::test_a_worker_killed_in_any_window_costs_at_most_the_calls_that_the_design_says",
        "store_contract.py::StoreContract::test_a_repeated_write_stores_and_bills_once",
    ),
    proved(
        "sent by any replica of the deployment",
        "integration/test_sinks.py::test_events_of_a_killed_replica_are_sent_by_another",
    ),
    proved(
        "at most 100 events a batch",
        "unit/test_billing_drainer.py::test_a_backlog_goes_in_batches_of_at_most_100_without_a_pause",
    ),
    proved(
        "5xx, 429 and time-outs again with backoff",
        "integration/test_sinks.py::test_events_that_are_not_taken_now_are_kept_and_sent_later",
        "unit/test_billing_drainer.py::test_a_receiver_that_is_away_gets_the_same_events_again_with_backoff",
    ),
    proved(
        "other 4xx one by one; an event refused alone goes to `infer_usage_refused:<DEPLOYMENT_ID>`",
        "integration/test_sinks.py::test_one_event_that_is_refused_blocks_no_other_and_is_put_aside",
    ),
    proved(
        "(409 counts as delivered)",
        "integration/test_sinks.py::test_an_event_that_the_receiver_has_already_counts_as_sent",
    ),
    proved(
        "nothing is kept with `CROESUS_HOST=off`", "integration/test_sinks.py::test_with_billing_off_nothing_is_kept"
    ),
    proved(
        "a gauge and a warning tell when it grows",
        "unit/test_billing_drainer.py::test_a_growing_outbox_is_seen_in_a_gauge_and_told_once_per_threshold",
    ),
)

PROMETHEUS: Final = (
    proved(
        "`/metrics` on `WORKER_HTTP_PORT`",
        "integration/test_health_and_suspension.py::test_the_status_and_the_metrics_tell_the_state",
        "unit/test_metrics.py::test_the_page_comes_in_the_format_asked_for",
    ),
    proved(
        "prefix `inference_worker_`; base units",
        "integration/test_exposition.py::test_names_have_the_prefix_and_base_units",
        "unit/test_metrics.py::test_names_have_the_prefix_and_end_in_their_unit",
    ),
    proved(
        "bounded labels",
        "integration/test_exposition.py::test_the_number_of_series_does_not_depend_on_what_comes",
    ),
    proved(
        "every label value that can occur exists at 0 from the start",
        "integration/test_exposition.py::test_every_label_value_is_there_at_0_from_the_start",
        "unit/test_metrics.py::test_every_series_is_there_from_the_start",
    ),
)

INTAKE: Final = (
    proved(
        "`dev` listens on `GATEWAY_HOST`:`GATEWAY_PORT`, by default `127.0.0.1:8080`",
        "integration/test_dev.py::test_default_ports_that_are_taken_are_left_to_their_owners",
        "integration/test_dev.py::test_a_port_that_was_named_and_is_taken_ends_it_with_one_line",
    ),
    proved(
        "`dev`: `POST /v1/jobs`, only `payload` required → 202 with `job_id` and `Location`",
        "unit/test_gateway_jobs.py::test_a_job_is_accepted_with_its_id_and_where_to_ask",
        "unit/test_gateway_jobs.py::test_only_the_payload_is_required",
        "unit/test_gateway_jobs.py::test_what_lies_in_the_queue_is_the_message_of_section_3",
    ),
    proved(
        "`dev`: `GET /v1/jobs/{job_id}`, its states; `?wait=SECONDS` holds the answer until the job has ended",
        "unit/test_gateway_jobs.py::test_a_job_runs_while_a_claim_on_it_is_alive_and_is_retrying_after_it",
        "unit/test_gateway_jobs.py::test_a_failure_is_the_state_that_its_reason_says",
        "unit/test_gateway_jobs.py::test_a_wait_ends_with_the_job",
    ),
    proved(
        "`dev`: `TRANSPORT` = `rabbitmq` or `memory`",
        "unit/test_settings.py::test_dev_uses_what_is_given",
        "integration/test_dev.py::test_real_servers_take_the_place_of_the_embedded_ones_each_by_itself",
    ),
    proved(
        "`idempotency_key`: same key, same job; 410 for a day after a result has gone",
        "unit/test_gateway_submit.py::test_the_same_key_means_the_same_job_once_in_the_queue",
        "integration/test_gateway.py::test_whenever_a_gateway_is_killed_a_key_means_one_job_that_runs_once",
        "unit/test_gateway_jobs.py::test_a_job_whose_result_has_gone_is_gone",
        "unit/test_gateway_jobs.py::test_a_job_of_which_nothing_can_come_any_more_is_gone_and_then_forgotten",
    ),
    proved(
        "cancelled = failed 499",
        "unit/test_gateway_submit.py::test_a_cancelled_job_is_shown_so_and_its_message_finds_the_result",
    ),
    proved(
        "`IWL_MAX_QUEUE_DEPTH` 10000 (0 = off)",
        "unit/test_gateway_submit.py::test_a_full_queue_says_when_there_should_be_room",
        "integration/test_gateway.py::test_a_full_queue_is_a_429_with_the_time_until_there_is_room",
    ),
    proved(
        "Stream `inference:jobs`, group `workers`, dead letters `inference:dlq`, and an entry's fields",
        "integration/test_streams_tools.py::test_a_request_waits_in_a_stream_that_no_worker_has_seen",
        "integration/test_redis_streams_faults.py::test_a_dead_letter_has_the_entry_and_what_became_of_it",
        "integration/test_redis_streams_faults.py::test_a_copy_keeps_every_field_but_the_attempt",
    ),
    proved(
        "a failed attempt is retried here also after a model's 429 or 5xx",
        "unit/test_settings.py::test_each_transport_has_its_own_temporary_statuses",
        "integration/test_redis_streams_kills.py::"
        "test_a_model_that_answers_500_is_tried_as_often_as_allowed_then_dead_lettered",
    ),
    proved(
        "`MODEL_MODE`, `IWL_CLAIM_IDLE_MS`, `IWL_MAX_ATTEMPTS`, `IWL_CONCURRENCY`",
        "integration/test_streams_tools.py::test_a_worker_with_a_mock_answers_without_any_model",
        "unit/test_settings.py::test_over_streams_its_own_variables_say_how_many_how_long_and_how_often",
    ),
)

INDEX: Final[Mapping[str, tuple[Sentence, ...]]] = {
    "1. Commands": COMMANDS,
    "2. The sidecar's environment": ENVIRONMENT,
    "3. RabbitMQ": RABBITMQ,
    "4. Results": RESULTS,
    "5. What becomes of a message": OUTCOMES,
    "6. Health and suspension": HEALTH,
    "7. Metric server and billing": SINKS,
    "8. Metrics for Prometheus": PROMETHEUS,
    "9. HTTP intake and Redis Streams": INTAKE,
}
