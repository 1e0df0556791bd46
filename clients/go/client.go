package orchestrator

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"time"
)

// Task describes a task to enqueue, with the fields of `POST /api/v1/tasks`. Times are seconds; Expires may also be a time.Time.
type Task struct {
	Name     string         `json:"name"`
	Args     []any          `json:"args,omitempty"`
	Kwargs   map[string]any `json:"kwargs,omitempty"`
	Queue    string         `json:"queue,omitempty"`
	Priority int            `json:"priority,omitempty"`
	Delay    float64        `json:"delay,omitempty"`
	ETA      *time.Time     `json:"eta,omitempty"`
	Expires  any            `json:"expires,omitempty"`
	// Retries and StoreResult are pointers because 0 and false differ from their defaults.
	Retries *int    `json:"retries,omitempty"`
	Timeout float64 `json:"timeout,omitempty"`
	// UniqueKey allows only one open task with this key.
	UniqueKey   string `json:"unique_key,omitempty"`
	OnDuplicate string `json:"on_duplicate,omitempty"`
	// IdempotencyKey prevents duplicates if a request is repeated. The default is a random key.
	IdempotencyKey string            `json:"idempotency_key,omitempty"`
	ConcurrencyKey string            `json:"concurrency_key,omitempty"`
	StoreResult    *bool             `json:"store_result,omitempty"`
	Redact         []string          `json:"redact,omitempty"`
	Headers        map[string]string `json:"headers,omitempty"`
}

// Start describes a run to start, with the fields of `POST /api/v1/workflows/{name}/runs`.
type Start struct {
	Params map[string]any `json:"params,omitempty"`
	Args   []any          `json:"args,omitempty"`
	Kwargs map[string]any `json:"kwargs,omitempty"`
	// Key prevents a second run if a request is repeated. The default is a random key.
	Key     string   `json:"key,omitempty"`
	Tags    []string `json:"tags,omitempty"`
	Queue   string   `json:"queue,omitempty"`
	Timeout float64  `json:"timeout,omitempty"`
	Pinned  bool     `json:"pinned,omitempty"`
}

// Problem describes the failure of a task or run.
type Problem struct {
	Kind      string         `json:"kind"`
	Message   string         `json:"message"`
	Traceback string         `json:"traceback"`
	Data      map[string]any `json:"data"`
}

// Ended reports that a task or run ended without a result: failed, cancelled or skipped.
type Ended struct {
	ID, Status string
	Problem    *Problem
}

func (e *Ended) Error() string {
	text := e.ID + " is " + e.Status
	if e.Problem != nil {
		text += ": " + e.Problem.Kind + ": " + e.Problem.Message
	}
	return text
}

// Handle refers to an enqueued task.
type Handle struct {
	client *Client
	kind   string
	ID     string `json:"id"`
	// Warning tells why the task may not run: no live worker knows its name.
	Warning string `json:"warning"`
}

// RunHandle refers to a started run.
type RunHandle struct{ Handle }

type outcome struct {
	Result       json.RawMessage        `json:"result"`
	ResultStored *struct{ Path string } `json:"result_stored"`
	Problem      *Problem               `json:"error"`
}

// answer is the state of a task or run, as the API returns it.
type answer struct {
	Task, Run struct{ Status string }
	Code      *outcome
	outcome
}

func (a *answer) status() string { return firstOf(a.Task.Status, a.Run.Status) }

// Enqueue stores a task. The task is durable when Enqueue returns.
func (c *Client) Enqueue(ctx context.Context, task Task) (*Handle, error) {
	if task.UniqueKey == "" && task.IdempotencyKey == "" {
		task.IdempotencyKey = randomKey()
	}
	repeat := task.UniqueKey == "" || task.OnDuplicate == "return"
	handle := c.Task("")
	return handle, c.send(ctx, request{"POST", "/api/v1/tasks", task, repeat}, handle)
}

// Task returns the handle of an existing task.
func (c *Client) Task(id string) *Handle { return &Handle{client: c, kind: "tasks", ID: id} }

// Start starts a run of a workflow: a DAG, or code.
func (c *Client) Start(ctx context.Context, workflow string, start Start) (*RunHandle, error) {
	if start.Key == "" {
		start.Key = randomKey()
	}
	handle := c.Run("")
	path := "/api/v1/workflows/" + url.PathEscape(workflow) + "/runs"
	return handle, c.send(ctx, request{"POST", path, start, true}, handle)
}

// Run returns the handle of an existing run.
func (c *Client) Run(id string) *RunHandle {
	return &RunHandle{Handle{client: c, kind: "runs", ID: id}}
}

func (h *Handle) path() string { return "/api/v1/" + h.kind + "/" + url.PathEscape(h.ID) }

// Status returns the state: pending, dispatched, running, success, failed, cancelled or skipped.
func (h *Handle) Status(ctx context.Context) (string, error) {
	var found answer
	err := h.client.get(ctx, h.path(), &found)
	return found.status(), err
}

// Result waits until the task or run ends, or the context does, and decodes the result into a pointer. The result of a DAG
// is a map from steps to outputs. Result returns *Ended if there is no result.
func (h *Handle) Result(ctx context.Context, result any) error {
	var found answer
	for isOpen := true; isOpen; {
		found = answer{}
		if err := h.client.get(ctx, h.path()+"?wait=30", &found); err != nil {
			return err
		}
		now := found.status()
		isOpen = now == "pending" || now == "dispatched" || now == "running"
	}
	end := found.outcome
	if found.Code != nil {
		end = *found.Code
	}
	if found.status() != "success" {
		return &Ended{h.ID, found.status(), end.Problem}
	}
	if end.ResultStored != nil {
		return h.client.get(ctx, end.ResultStored.Path, result)
	}
	if h.kind == "runs" && found.Code == nil {
		return h.client.get(ctx, h.path()+"/outputs", &struct{ Outputs any }{result})
	}
	return json.Unmarshal(end.Result, result)
}

// Cancel requests the cancellation of the task or run.
func (h *Handle) Cancel(ctx context.Context) error {
	return h.client.send(ctx, request{"POST", h.path() + "/cancel", nil, true}, nil)
}

// Signal sends a signal without retries: after ErrUnreachable the signal may have arrived.
func (r *RunHandle) Signal(ctx context.Context, name string, value any) error {
	_, err := r.client.post(ctx, r.path()+"/signals/"+url.PathEscape(name), map[string]any{"value": value}, nil)
	return err
}

// Query calls a query of the workflow's code and decodes the answer.
func (r *RunHandle) Query(ctx context.Context, name string, kwargs map[string]any, answer any) error {
	path, body := r.path()+"/queries/"+url.PathEscape(name), Start{Kwargs: kwargs}
	return r.client.send(ctx, request{"POST", path, body, true}, &struct{ Result any }{answer})
}

func randomKey() string {
	data := make([]byte, 16)
	if _, err := rand.Read(data); err != nil {
		panic(err) // the system's random source failed
	}
	return hex.EncodeToString(data)
}
