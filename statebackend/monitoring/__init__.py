"""What shows how a job fares: metrics, traces, the rules and the dashboard that go with them."""
