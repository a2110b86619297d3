// Package jaeger reads traces from the query API of Jaeger. It only reads. All of it may be called concurrently.
package jaeger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Reasons of this package's errors; no server of the project sends them.
const (
	// ReasonUnavailable: Jaeger cannot be reached, or its answer is not one of Jaeger.
	ReasonUnavailable fault.Reason = "TRACE_STORE_UNAVAILABLE"
	// ReasonNotFound: Jaeger does not have the trace.
	ReasonNotFound fault.Reason = "TRACE_NOT_FOUND"
)

// maxBytes is the maximum size of an answer.
const maxBytes = 64 << 20

// Span is one span of a trace.
type Span struct {
	// ID identifies the span in its trace. Parent is the ID of the span that caused it; empty if there is none.
	ID, Parent string
	// Service and Name are the process and the operation.
	Service, Name string
	// Start and Duration have a resolution of one microsecond.
	Start    time.Time
	Duration time.Duration
	// Error is the message of a span that failed, or "no message". Empty if the span did not fail.
	Error string
}

// Client reads from one Jaeger.
type Client struct {
	address string
	http    *http.Client
}

// New returns a client of the Jaeger whose query API is at the address, for instance http://127.0.0.1:16686.
func New(address string, client *http.Client) *Client {
	return &Client{address: strings.TrimRight(address, "/"), http: client}
}

// answer is an answer of the query API.
type answer struct {
	Data []struct {
		Spans     []span `json:"spans"`
		Processes map[string]struct {
			ServiceName string `json:"serviceName"`
		} `json:"processes"`
	} `json:"data"`
	Errors []struct {
		Code int    `json:"code"`
		Msg  string `json:"msg"`
	} `json:"errors"`
}

// span is a span in Jaeger's format.
type span struct {
	SpanID        string      `json:"spanID"`
	OperationName string      `json:"operationName"`
	References    []reference `json:"references"`
	StartTime     int64       `json:"startTime"` // microseconds
	Duration      int64       `json:"duration"`  // microseconds
	Tags          []tag       `json:"tags"`
	ProcessID     string      `json:"processID"`
}

type reference struct {
	RefType string `json:"refType"`
	TraceID string `json:"traceID"`
	SpanID  string `json:"spanID"`
}

type tag struct {
	Key   string `json:"key"`
	Value any    `json:"value"`
}

// Trace returns the spans of a trace. An error is classified: Unavailable, or NotFound if Jaeger does not have the trace.
// Safe to retry.
func (c *Client) Trace(ctx context.Context, id string) ([]Span, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.address+"/api/traces/"+url.PathEscape(id), nil)
	if err != nil {
		return nil, fault.New(errdefs.ErrInvalidArgument, ReasonUnavailable, "invalid address %q: %s", c.address, err)
	}
	response, err := c.http.Do(request)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("reading trace %s: %w", id, ctx.Err())
	}
	if err != nil {
		var broken *url.Error
		if errors.As(err, &broken) {
			err = broken.Err // without the URL, which the message has
		}
		return nil, fault.New(errdefs.ErrUnavailable, ReasonUnavailable, "connecting to Jaeger at %s: %s", c.address, err)
	}
	defer response.Body.Close()
	var a answer
	if err := json.NewDecoder(io.LimitReader(response.Body, maxBytes)).Decode(&a); err != nil {
		return nil, fault.New(errdefs.ErrUnavailable, ReasonUnavailable, "reading from Jaeger at %s: status %s is not followed by JSON", c.address, response.Status)
	}
	switch {
	case response.StatusCode == http.StatusNotFound, len(a.Errors) == 0 && len(a.Data) == 0:
		return nil, fault.New(errdefs.ErrNotFound, ReasonNotFound, "Jaeger at %s does not have trace %s", c.address, id)
	case len(a.Errors) > 0:
		return nil, fault.New(errdefs.ErrUnavailable, ReasonUnavailable, "reading trace %s: %s", id, a.Errors[0].Msg)
	}
	var out []Span
	for _, trace := range a.Data {
		for _, s := range trace.Spans {
			out = append(out, Span{
				ID: s.SpanID, Parent: s.parent(), Service: trace.Processes[s.ProcessID].ServiceName, Name: s.OperationName,
				Start: time.UnixMicro(s.StartTime), Duration: time.Duration(s.Duration) * time.Microsecond, Error: s.failure(),
			})
		}
	}
	return out, nil
}

// parent returns the ID of the span that caused s: its parent, else the span that it follows.
func (s span) parent() string {
	follows := ""
	for _, r := range s.References {
		switch r.RefType {
		case "CHILD_OF":
			return r.SpanID
		case "FOLLOWS_FROM":
			follows = r.SpanID
		}
	}
	return follows
}

// failure returns the error of the span.
func (s span) failure() string {
	failed, message := false, ""
	for _, t := range s.Tags {
		switch t.Key {
		case "error":
			failed = t.Value == true || t.Value == "true"
		case "otel.status_description":
			message, _ = t.Value.(string)
		}
	}
	switch {
	case !failed:
		return ""
	case message == "":
		return "no message"
	}
	return message
}
