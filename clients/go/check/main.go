// The client's test program: it uses everything except the worker, and exits with 0 if all of it works.
package main

import (
	"context"
	"errors"
	"log"
	"reflect"
	"time"

	orchestrator "example.com/durable-orchestrator/client"
)

func expect(found, expected any) {
	if !reflect.DeepEqual(found, expected) {
		log.Fatalf("expected %#v, found %#v", expected, found)
	}
}

func must[T any](value T, err error) T {
	expect(err, nil)
	return value
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := &orchestrator.Client{}
	var sum int
	added := must(client.Enqueue(ctx, orchestrator.Task{Name: "project.add", Args: []any{1, 2}}))
	expect(added.Result(ctx, &sum), nil)
	expect(sum, 3)
	expect(must(client.Task(added.ID).Status(ctx)), "success")

	once := orchestrator.Task{Name: "project.add", Args: []any{1, 2}, IdempotencyKey: "go-1"}
	expect(must(client.Enqueue(ctx, once)).ID, must(client.Enqueue(ctx, once)).ID)

	unique := orchestrator.Task{Name: "project.add", Args: []any{1, 2}, UniqueKey: "go-2", OnDuplicate: "return", Delay: 600}
	waiting := must(client.Enqueue(ctx, unique))
	expect(must(client.Enqueue(ctx, unique)).ID, waiting.ID)
	unique.OnDuplicate = "raise"
	_, err := client.Enqueue(ctx, unique)
	var refused *orchestrator.APIError
	expect(errors.As(err, &refused) && refused.Status == 409, true)
	short, end := context.WithTimeout(ctx, time.Second)
	defer end()
	expect(waiting.Result(short, nil) != nil, true)
	expect(waiting.Cancel(ctx), nil)
	var ended *orchestrator.Ended
	expect(errors.As(waiting.Result(ctx, nil), &ended) && ended.Status == "cancelled", true)

	none := 0
	failing := must(client.Enqueue(ctx, orchestrator.Task{Name: "project.add", Args: []any{"a", 1}, Retries: &none}))
	expect(errors.As(failing.Result(ctx, nil), &ended) && ended.Status == "failed" && ended.Problem.Kind != "", true)

	run := must(client.Start(ctx, "project.basket", orchestrator.Start{Key: "go-3"}))
	expect(must(client.Start(ctx, "project.basket", orchestrator.Start{Key: "go-3"})).ID, run.ID)
	expect(run.Signal(ctx, "add", "tea ☕"), nil)
	var items []string
	for len(items) == 0 {
		expect(run.Query(ctx, "items", nil, &items), nil)
	}
	expect(items, []string{"tea ☕"})
	expect(run.Signal(ctx, "add", "pay"), nil)
	expect(run.Result(ctx, &items), nil)
	expect(items, []string{"tea ☕"})
}
