from prometheus_client.parser import text_string_to_metric_families

from plait.generate.request import Event
from plait.serve.metrics import Metrics


def test_metrics_are_in_the_form_that_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.count_response("/v1/models", 200)
    metrics.count_event(Event("a", 1, "x", None, 7, 1), 0.2, is_first=True)
    metrics.count_event(Event("a", 1, "x", "length", 7, 2), 0.03, is_first=False)
    metrics.count_event(Event("b", None, "", "cancelled", 5, 0), 0.5, is_first=True)
    metrics.show_load(num_waiting=3, num_running=2)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    wanted = {
        ("plait_http_responses_total", "/v1/models", "200"): 1,
        ("plait_sequences_total", "length"): 1,
        ("plait_sequences_total", "cancelled"): 1,
        ("plait_prompt_tokens_total",): 7,
        ("plait_generated_tokens_total",): 2,
        ("plait_sequences_waiting",): 3,
        ("plait_sequences_running",): 2,
        ("plait_time_to_first_token_seconds_count",): 1,
        ("plait_time_to_first_token_seconds_bucket", "0.1"): 0,
        ("plait_time_to_first_token_seconds_bucket", "0.25"): 1,
        ("plait_time_per_token_seconds_count",): 1,
        ("plait_time_per_token_seconds_sum",): 0.03,
    }
    assert {key: samples[key] for key in wanted} == wanted
