package orchestrator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	mostLines   = 1000
	pollSeconds = 5 // a stopping worker waits for its polls
)

// Work is leased work, as the API gives it.
type Work struct {
	QueueID string `json:"queue_id"`
	TaskID  string `json:"task_id"`
	Task    string `json:"task"`
	Service string `json:"service"`
	// RequestID is the same for every holder of the work: use it to recognise a repetition.
	RequestID string `json:"request_id"`
	// Attempt is which lease of this try it is, from 1.
	Attempt int             `json:"attempt"`
	Lease   float64         `json:"lease"`
	Input   json.RawMessage `json:"input"`
	Params  json.RawMessage `json:"params"`
}

// Job is work in the hands of a handler.
type Job struct {
	Work
	isDone   atomic.Bool
	mutex    sync.Mutex
	lines    []string
	progress *progress
}

type progress struct {
	Fraction float64 `json:"fraction"`
	Text     string  `json:"text"`
}

// Log adds a line to the log of the task, which takes a thousand. It is sent with the result.
func (j *Job) Log(line string) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if len(j.lines) < mostLines {
		j.lines = append(j.lines, line)
	}
}

// Progress shows how far the work is, from 0 to 1. It is sent with the next heartbeat.
func (j *Job) Progress(fraction float64, text string) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if runes := []rune(text); len(runes) > mostLines {
		text = string(runes[:mostLines])
	}
	j.progress = &progress{math.Max(0, math.Min(1, fraction)), text}
}

// Failure says how the work failed. Any other error is retryable, and its type is the kind.
type Failure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Detail  string `json:"detail,omitempty"`
	// Retryable is true if it is nil.
	Retryable *bool `json:"retryable,omitempty"`
	// RetryAfter is the time before the next try, in seconds; nil: the task's own policy says.
	RetryAfter *float64 `json:"retry_after,omitempty"`
}

func (f *Failure) Error() string { return f.Kind + ": " + f.Message }

// Handler does work. Its context ends when the work is cancelled, its lease is lost, or the worker has no more time to
// drain: return then.
type Handler func(ctx context.Context, job *Job) (any, error)

// Worker pulls work and does it.
type Worker struct {
	Client *Client
	// Handlers has a function for each service.
	Handlers map[string]Handler
	// Concurrency is how many handlers run at once; 0 means 1.
	Concurrency int
	// ID is shown as the holder of the work; the default has the process id.
	ID string
	// Drain is the time that running work gets after the context of Run has ended; then it is given back.
	Drain time.Duration
}

// Run works until the context ends, and returns when running work has ended or was given back. It returns an error if
// the API refuses polls for good, for example with a wrong key.
func (w *Worker) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// Requests and handlers outlive the context: they end with the time to drain.
	working, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		<-ctx.Done()
		sleep(working, w.Drain)
		end()
	}()
	services := make([]string, 0, len(w.Handlers))
	for name := range w.Handlers {
		services = append(services, name)
	}
	var slots sync.WaitGroup
	var once sync.Once
	var refusal error
	for i := 0; i == 0 || i < w.Concurrency; i++ {
		slots.Add(1)
		go func() {
			defer slots.Done()
			if err := w.slot(ctx, working, services); err != nil {
				once.Do(func() { refusal = err })
				stop()
			}
		}()
	}
	slots.Wait()
	return refusal
}

func (w *Worker) slot(ctx, working context.Context, services []string) error {
	id := firstOf(w.ID, fmt.Sprintf("go-%d", os.Getpid()))
	asked := map[string]any{"worker_id": id, "services": services, "wait": pollSeconds}
	for failures := 0; ctx.Err() == nil; {
		job := &Job{}
		// An aborted poll may have leased work: it is left to end.
		status, err := w.Client.post(context.Background(), "/queue/poll", asked, &job.Work)
		switch {
		case status == 400 || status == 401 || status == 403 || status == 422:
			return err
		case err != nil:
			log.Printf("poll: %v", err)
			sleep(ctx, pause(err, failures))
			failures++
			continue
		case status == 200 && ctx.Err() != nil:
			w.giveBack(job)
		case status == 200:
			w.perform(working, job)
		}
		failures = 0
	}
	return nil
}

func (w *Worker) perform(working context.Context, job *Job) {
	ctx, stop := context.WithCancel(working)
	beating, completed := context.WithCancel(context.Background())
	go w.beat(beating, ctx, stop, job)
	done := make(chan struct{})
	go func() {
		defer close(done)
		said := w.outcome(ctx, job)
		job.isDone.Store(true)
		w.complete(ctx, job, said)
	}()
	select {
	case <-done:
	case <-working.Done(): // the handler gets a moment to return
		sleep(beating, time.Second)
	}
	completed()
	if ctx.Err() != nil && working.Err() != nil {
		w.giveBack(job)
	}
	stop()
}

// outcome runs the handler; it returns the fields of the completion.
func (w *Worker) outcome(ctx context.Context, job *Job) (said map[string]any) {
	defer func() {
		if found := recover(); found != nil {
			said = map[string]any{"error": &Failure{Kind: "panic", Message: fmt.Sprint(found)}}
		}
	}()
	result, err := w.Handlers[job.Service](ctx, job)
	if err == nil {
		_, err = json.Marshal(result)
	}
	if err == nil {
		return map[string]any{"result": result}
	}
	failure := &Failure{Kind: fmt.Sprintf("%T", err), Message: err.Error()}
	errors.As(err, &failure)
	return map[string]any{"error": failure}
}

// complete sends the outcome until it is known to be safe, or the work is not wanted any more.
func (w *Worker) complete(ctx context.Context, job *Job, said map[string]any) {
	job.mutex.Lock()
	said["queue_id"], said["logs"] = job.QueueID, append([]string{}, job.lines...)
	job.mutex.Unlock()
	isRefused := false
	for failures := 0; ctx.Err() == nil; failures++ {
		status, err := w.Client.post(ctx, "/queue/complete", said, nil)
		if err == nil || status == 404 || status == 409 {
			return
		}
		log.Printf("complete %s: %v", job.QueueID, err)
		if (status == 400 || status == 413 || status == 422) && !isRefused {
			isRefused = true
			never := false
			failure := &Failure{Kind: "ResultRefused", Message: "The API refused the result: " + err.Error(), Retryable: &never}
			said = map[string]any{"queue_id": job.QueueID, "error": failure}
			continue
		}
		sleep(ctx, pause(err, failures))
	}
}

// beat renews the lease until the work has ended, and stops the handler if the lease or the work is gone.
func (w *Worker) beat(beating, ctx context.Context, stop context.CancelFunc, job *Job) {
	third := toDuration(job.Lease / 3)
	var shown *progress
	for {
		sleep(beating, third)
		if beating.Err() != nil || ctx.Err() != nil {
			return
		}
		body := map[string]any{"queue_id": job.QueueID}
		job.mutex.Lock()
		latest := job.progress
		job.mutex.Unlock()
		if latest != shown {
			body["progress"] = latest
		}
		limited, cancel := context.WithTimeout(beating, third)
		status, err := w.Client.post(limited, "/queue/heartbeat", body, nil)
		cancel()
		if err == nil {
			shown = latest
		} else if (status == 404 || status == 409) && !job.isDone.Load() { // then only the completion's answer counts
			stop()
		}
	}
}

func (w *Worker) giveBack(job *Job) {
	if _, err := w.Client.post(context.Background(), "/queue/return", map[string]any{"queue_id": job.QueueID}, nil); err != nil {
		log.Printf("return %s: %v", job.QueueID, err) // its lease expires by itself
	}
}
