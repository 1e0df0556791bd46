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
	maxLines    = 1000
	pollSeconds = 5 // seconds that a poll waits for work; a stopping worker waits for its polls
)

// Work is leased work, as the API returns it.
type Work struct {
	QueueID string `json:"queue_id"`
	TaskID  string `json:"task_id"`
	Task    string `json:"task"`
	Service string `json:"service"`
	// RequestID is the same for every lease of the work: use it to recognize a repetition.
	RequestID string `json:"request_id"`
	// Attempt counts the leases of this try, from 1.
	Attempt int             `json:"attempt"`
	Lease   float64         `json:"lease"`
	Input   json.RawMessage `json:"input"`
	Params  json.RawMessage `json:"params"`
}

// Job is the work that a handler processes.
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

// Log adds a line to the log of the task, at most 1,000. The lines are sent with the result.
func (j *Job) Log(line string) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if len(j.lines) < maxLines {
		j.lines = append(j.lines, line)
	}
}

// Progress reports the progress of the work, from 0 to 1, with the next heartbeat.
func (j *Job) Progress(fraction float64, text string) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if runes := []rune(text); len(runes) > maxLines {
		text = string(runes[:maxLines])
	}
	j.progress = &progress{math.Max(0, math.Min(1, fraction)), text}
}

// Failure describes the failure of the work. Any other error is retryable, and its type is the kind.
type Failure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Detail  string `json:"detail,omitempty"`
	// Retryable means true if it is nil.
	Retryable *bool `json:"retryable,omitempty"`
	// RetryAfter is the delay before the next try, in seconds; nil: the task's retry policy decides.
	RetryAfter *float64 `json:"retry_after,omitempty"`
}

func (f *Failure) Error() string { return f.Kind + ": " + f.Message }

// Handler processes work. It must return when its context ends: the work was cancelled, its lease is lost, or the
// worker's drain time is over.
type Handler func(ctx context.Context, job *Job) (any, error)

// Worker pulls work and processes it.
type Worker struct {
	Client *Client
	// Handlers has a function for each service.
	Handlers map[string]Handler
	// Concurrency is the number of handlers that run at the same time; 0 means 1.
	Concurrency int
	// ID names the worker in the dashboard; the default contains the process id.
	ID string
	// Drain is the time for running work after the context of Run has ended; then the work is returned.
	Drain time.Duration
}

// Run works until the context ends, and returns when running work has ended or was returned. It returns an error if the
// API permanently refuses polls, for example because of a wrong key.
func (w *Worker) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// Requests and handlers outlive the context until the drain time is over.
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
		// Never abort a poll: it may already have leased work.
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
	case <-working.Done(): // give the handler a moment to return
		sleep(beating, time.Second)
	}
	completed()
	if ctx.Err() != nil && working.Err() != nil {
		w.giveBack(job)
	}
	stop()
}

// outcome runs the handler and returns the fields of the completion.
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

// complete sends the outcome until the API has stored it or no longer needs it.
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

// beat renews the lease until the work has ended, and stops the handler if the lease is lost or the work is cancelled.
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
		} else if (status == 404 || status == 409) && !job.isDone.Load() { // once done, only the completion's answer counts
			stop()
		}
	}
}

func (w *Worker) giveBack(job *Job) {
	if _, err := w.Client.post(context.Background(), "/queue/return", map[string]any{"queue_id": job.QueueID}, nil); err != nil {
		log.Printf("return %s: %v", job.QueueID, err) // the lease will expire
	}
}
