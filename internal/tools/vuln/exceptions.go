package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"sigs.k8s.io/yaml"
)

// exception is the decision of a person about a vulnerability whose function is called.
type exception struct {
	// ID of the vulnerability, GO-YEAR-NUMBER.
	ID string `json:"id"`
	// Reason why it does no harm here, or why it cannot be mended yet.
	Reason string `json:"reason"`
	// Until is the last day on which it counts (YYYY-MM-DD). It must be reviewed again then.
	Until string `json:"until"`
}

// readExceptions reads the file of exceptions; there are none without a file.
func readExceptions(path string) ([]exception, error) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the exceptions: %w", err)
	}
	var file struct {
		Exceptions []exception `json:"exceptions"`
	}
	if err := yaml.UnmarshalStrict(raw, &file); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	var problems []error
	for i, e := range file.Exceptions {
		if _, err := time.Parse(time.DateOnly, e.Until); err != nil || e.ID == "" || e.Reason == "" {
			problems = append(problems, fmt.Errorf("%s: exception %d needs an id, a reason, and a day (YYYY-MM-DD) until which it counts", path, i+1))
		}
	}
	return file.Exceptions, errors.Join(problems...)
}

// ended reports whether an exception no longer counts.
func (e exception) ended(now time.Time) bool { return now.Format(time.DateOnly) > e.Until }

// judge prints each vulnerability, and fails for those that are called and not excepted, and for exceptions that do not count.
func judge(out io.Writer, found []vulnerability, exceptions []exception, now time.Time) error {
	reviewed := map[string]exception{}
	for _, e := range exceptions {
		reviewed[e.ID] = e
	}
	var problems []error
	needed := map[string]bool{}
	for _, v := range found {
		e, ok := reviewed[v.id]
		state := "not called"
		switch {
		case v.called == "":
		case ok && !e.ended(now):
			state, needed[v.id] = "excepted until "+e.Until+": "+e.Reason, true
		case ok:
			state, needed[v.id] = "called by "+v.called, true
			problems = append(problems, fmt.Errorf("the exception of %s has ended on %s: review it again", v.id, e.Until))
		default:
			state = "called by " + v.called
			problems = append(problems, fmt.Errorf("%s is called by %s: update %s to %s, or review it", v.id, v.called, v.module, orNone(v.fixed)))
		}
		_, _ = fmt.Fprintf(out, "%s  %s %s (fixed in %s)  %s  %s\n", v.id, v.module, v.version, orNone(v.fixed), v.summary, state)
	}
	for _, e := range exceptions {
		if !needed[e.ID] {
			problems = append(problems, fmt.Errorf("the exception of %s is no longer needed: remove it", e.ID))
		}
	}
	_, _ = fmt.Fprintf(out, "%d vulnerabilities, %d problems\n", len(found), len(problems))
	return errors.Join(problems...)
}

func orNone(version string) string {
	if version == "" {
		return "no version yet"
	}
	return version
}
