// Package orchestrator is a client of the orchestrator's HTTP API: it enqueues tasks, starts runs, waits for both, and
// runs workers for tasks with the executor `pull`.
package orchestrator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// APIError reports that the API rejected a request. Type is stable, such as `urn:orchestrator:error:WrongState`.
type APIError struct {
	Status int             `json:"status"`
	Type   string          `json:"type"`
	Title  string          `json:"title"`
	Detail string          `json:"detail"`
	Data   json.RawMessage `json:"data"`
	// RetryAfter is the delay that the API requests, or negative.
	RetryAfter time.Duration `json:"-"`
}

func (e *APIError) Error() string { return fmt.Sprintf("%d: %s %s", e.Status, e.Title, e.Detail) }

// ErrUnreachable reports that no answer arrived: the API may or may not have processed the request.
var ErrUnreachable = errors.New("the API cannot be reached")

// Client talks to one API. Its zero value uses ORCHESTRATOR_API_URL and ORCHESTRATOR_API_KEY.
type Client struct {
	URL  string
	Key  string
	HTTP http.Client
}

const (
	longest  = 90 * time.Second // maximum duration of a request
	retryFor = 30 * time.Second // duration of retries of a repeatable request
)

// request is one request to the API; with repeat, it is sent again if no answer arrived.
type request struct {
	method, path string
	body         any
	repeat       bool
}

func (c *Client) send(ctx context.Context, r request, answer any) error {
	until := time.Now().Add(retryFor)
	for failures := 0; ; failures++ {
		status, err := c.once(ctx, r, answer)
		mayPass := errors.Is(err, ErrUnreachable) || status == 429 || status >= 500
		if wait := pause(err, failures); err == nil || !r.repeat || !mayPass || time.Now().Add(wait).After(until) {
			return err
		} else if sleep(ctx, wait); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (c *Client) get(ctx context.Context, path string, answer any) error {
	return c.send(ctx, request{"GET", path, nil, true}, answer)
}

// post sends a request without retries; it returns the status, or 0 if no answer arrived.
func (c *Client) post(ctx context.Context, path string, body any, answer any) (int, error) {
	return c.once(ctx, request{"POST", path, body, false}, answer)
}

// once sends a request without retries; it returns the status, and decodes the answer unless the target is nil.
func (c *Client) once(ctx context.Context, r request, answer any) (int, error) {
	var body io.Reader
	if r.body != nil {
		data, err := json.Marshal(r.body)
		if err != nil {
			return 0, err
		}
		body = bytes.NewReader(data)
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	address := firstOf(c.URL, os.Getenv("ORCHESTRATOR_API_URL"), "http://127.0.0.1:8000")
	sent, err := http.NewRequestWithContext(ctx, r.method, strings.TrimRight(address, "/")+r.path, body)
	if err != nil {
		return 0, err
	}
	sent.Header.Set("Content-Type", "application/json")
	if key := firstOf(c.Key, os.Getenv("ORCHESTRATOR_API_KEY")); key != "" {
		sent.Header.Set("Authorization", "Bearer "+key)
	}
	got, err := c.HTTP.Do(sent)
	if err != nil {
		return 0, fmt.Errorf("%w: %v", ErrUnreachable, err)
	}
	defer got.Body.Close()
	data, err := io.ReadAll(got.Body)
	if err != nil {
		return 0, fmt.Errorf("%w: %v", ErrUnreachable, err)
	}
	if got.StatusCode >= 300 {
		return got.StatusCode, problem(got, data)
	}
	if answer == nil || len(data) == 0 {
		return got.StatusCode, nil
	}
	return got.StatusCode, json.Unmarshal(data, answer)
}

func problem(got *http.Response, data []byte) *APIError {
	found := &APIError{}
	if json.Unmarshal(data, found) != nil { // not the API's JSON: a proxy answered
		found.Detail = fmt.Sprintf("%.200s", data)
	}
	found.Status, found.RetryAfter = got.StatusCode, -1
	if seconds, err := strconv.ParseFloat(got.Header.Get("Retry-After"), 64); err == nil && seconds >= 0 {
		found.RetryAfter = toDuration(seconds)
	}
	return found
}

// pause returns the backoff after a number of failures.
func pause(err error, failures int) time.Duration {
	var refused *APIError
	if errors.As(err, &refused) && refused.RetryAfter >= 0 {
		return refused.RetryAfter
	}
	return toDuration(math.Min(10, math.Pow(2, float64(failures-1))) * (0.75 + rand.Float64()/2))
}

// sleep waits for a duration, or until the context ends.
func sleep(ctx context.Context, duration time.Duration) {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func toDuration(seconds float64) time.Duration {
	return time.Duration(seconds * float64(time.Second))
}

func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}
