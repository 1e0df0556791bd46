module example.com/durable-orchestrator/client

go 1.19
