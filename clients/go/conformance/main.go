// The program of the conformance suite: see README.md.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	orchestrator "example.com/durable-orchestrator/client"
)

type input struct {
	Do, Kind, Message, Text string
	Value                   json.RawMessage
	Bytes                   int
	Retryable               *bool
	RetryAfter              *float64 `json:"retry_after"`
	Lines                   []string
	Seconds, Fraction       float64
}

func conformance(ctx context.Context, job *orchestrator.Job) (any, error) {
	var given input
	if err := json.Unmarshal(job.Input, &given); err != nil {
		return nil, err
	}
	switch given.Do {
	case "return":
		return given.Value, nil
	case "large":
		return strings.Repeat("x", given.Bytes), nil
	case "fail":
		return nil, &orchestrator.Failure{
			Kind: given.Kind, Message: given.Message, Retryable: given.Retryable, RetryAfter: given.RetryAfter,
		}
	case "log":
		for _, line := range given.Lines {
			job.Log(line)
		}
		return nil, nil
	case "progress":
		job.Progress(given.Fraction, given.Text)
	}
	select {
	case <-time.After(time.Duration(given.Seconds * float64(time.Second))):
		return job.Attempt, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	concurrency, _ := strconv.Atoi(os.Getenv("CONFORMANCE_CONCURRENCY"))
	drain, _ := strconv.Atoi(os.Getenv("CONFORMANCE_DRAIN"))
	worker := orchestrator.Worker{
		Client:      &orchestrator.Client{},
		Handlers:    map[string]orchestrator.Handler{"conformance": conformance},
		Concurrency: concurrency,
		Drain:       time.Duration(drain) * time.Second,
	}
	if err := worker.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
