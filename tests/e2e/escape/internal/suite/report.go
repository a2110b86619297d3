package suite

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Report is the result of a run.
type Report struct {
	// Attempts is how many were planned. Each was refused, has succeeded, or could not be made.
	Attempts  int `json:"attempts"`
	Refused   int `json:"refused"`
	Succeeded int `json:"succeeded"`
	// Failures are the attempts that succeeded and must not, that are expected to succeed and did not, or that could not be made.
	Failures []Failure `json:"failures"`
	// Expected are the attempts that succeeded and that a later issue closes.
	Expected []Expected `json:"expected"`
	// Unproven are the attempts whose check could not be proved on this machine: they did not succeed in an open container either.
	Unproven []Unproven `json:"unproven"`
	// Figures are what was measured.
	Figures map[string]float64 `json:"figures,omitempty"`
	Seconds float64            `json:"seconds"`
}

// Failure is an attempt that did not end as it must.
type Failure struct {
	Name    string `json:"name"`
	Where   string `json:"where,omitempty"`
	What    string `json:"what"`
	Does    string `json:"does,omitempty"`
	Success string `json:"success_is,omitempty"`
}

// Expected is an attempt that succeeded and that a later issue closes.
type Expected struct {
	Name     string `json:"name"`
	Where    string `json:"where,omitempty"`
	Issue    string `json:"issue"`
	Evidence string `json:"evidence"`
}

// Unproven is an attempt whose check is not proved, and why it cannot be.
type Unproven struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Good reports whether every attempt ended as it must.
func (r *Report) Good() bool { return len(r.Failures) == 0 }

// String is the JSON.
func (r *Report) String() string {
	raw, err := json.Marshal(r)
	if err != nil { // it has texts and numbers alone
		panic(err)
	}
	return string(raw)
}

// errBroken marks errors that say that an attempt could not be made.
var errBroken = errors.New("attempt not made")

// Brokenf returns an error that says why an attempt could not be made, or its result not be found out.
func Brokenf(format string, args ...any) error {
	return broken{fmt.Errorf(format, args...)}
}

type broken struct{ error }

func (b broken) Is(target error) bool { return target == errBroken }

func (b broken) Unwrap() error { return b.error }

// IsBroken reports whether an error says that an attempt could not be made.
func IsBroken(err error) bool { return errors.Is(err, errBroken) }
