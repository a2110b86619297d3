// Package suite is what an attempt to escape is, what came of it, and the report about all of them. It is PURE: it makes no
// attempt itself. Values of Log may be used concurrently, all others by one goroutine.
package suite

import (
	"cmp"
	"slices"
	"sync"
)

// The issues that close what is expected to succeed until then.
const (
	// Network is the issue that gives each sandbox a network of its own.
	Network = "issue 16: a network for each sandbox"
)

// Attempt is one way in which something hostile tries what it must not be able to do.
type Attempt struct {
	// Name identifies the attempt in its suite, as "group: what".
	Name string
	// Does is what it does.
	Does string
	// Success is how its success is recognized.
	Success string
	// Expected is the issue that will close it. Until then it has to succeed, so that the list shrinks when it is closed. Empty: it
	// must be refused.
	Expected string
}

// Planned is an attempt that has to be made.
type Planned struct {
	Attempt
	// Where tells several makings of one attempt apart, such as "root, slot". It may be empty.
	Where string
}

// Outcome is what came of one attempt. It is also a line of the output of the program that is hostile inside a sandbox.
type Outcome struct {
	// Name is that of the attempt, and Where that of the plan.
	Name  string `json:"name"`
	Where string `json:"where,omitempty"`
	// Evidence proves that the attempt has succeeded; empty if it has not.
	Evidence string `json:"evidence,omitempty"`
	// Refused is why it has not succeeded, for people.
	Refused string `json:"refused,omitempty"`
	// Broken is why the attempt could not be made, or its result not be found out. It then proves nothing.
	Broken string `json:"broken,omitempty"`
}

// Log collects outcomes.
type Log struct {
	mu       sync.Mutex
	planned  []Planned
	outcomes []Outcome
	unproven []Unproven
	figures  map[string]float64
}

// Plan adds attempts that have to be made, in one place.
func (l *Log) Plan(where string, attempts ...Attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range attempts {
		l.planned = append(l.planned, Planned{a, where})
	}
}

// Add adds an outcome.
func (l *Log) Add(o Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outcomes = append(l.outcomes, o)
}

// Made plans an attempt and adds its outcome: evidence if it has succeeded, else why it was refused. An error of Brokenf says that it
// could not be made.
func (l *Log) Made(a Attempt, where, evidence string, refused error) {
	l.Plan(where, a)
	l.Add(NewOutcome(a.Name, where, evidence, refused))
}

// Unproven adds an attempt that has not succeeded where nothing prevents it, so that its check is not proved. That is a failure, unless
// there is a reason for it on this machine.
func (l *Log) Unproven(name, reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unproven = append(l.unproven, Unproven{name, reason})
}

// Figure adds a measured value for the report.
func (l *Log) Figure(name string, value float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.figures == nil {
		l.figures = map[string]float64{}
	}
	l.figures[name] = value
}

// Report returns the report about everything so far.
func (l *Log) Report() *Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := Judge(l.planned, l.outcomes)
	r.Figures = l.figures
	r.Unproven = append(r.Unproven, l.unproven...)
	slices.SortFunc(r.Unproven, func(a, b Unproven) int { return cmp.Compare(a.Name, b.Name) })
	for _, u := range l.unproven {
		if u.Reason == "" {
			r.fail(Planned{Attempt: Attempt{Name: u.Name}}, "its check is not proved: it does not succeed in an open container either")
		}
	}
	return r
}

// NewOutcome returns an outcome.
func NewOutcome(name, where, evidence string, err error) Outcome {
	o := Outcome{Name: name, Where: where, Evidence: evidence}
	switch {
	case evidence != "":
	case IsBroken(err):
		o.Broken = err.Error()
	case err != nil:
		o.Refused = err.Error()
	default:
		o.Refused = "nothing came of it"
	}
	return o
}

// Judge compares what was planned with what came of it.
func Judge(planned []Planned, outcomes []Outcome) *Report {
	r := &Report{Failures: []Failure{}, Expected: []Expected{}, Unproven: []Unproven{}}
	type key struct{ name, where string }
	found := map[key]Outcome{}
	for _, o := range outcomes {
		k := key{o.Name, o.Where}
		if old, twice := found[k]; twice && (old.Evidence != "" || old.Broken != "") {
			continue // one success is enough
		}
		found[k] = o
	}
	for _, p := range planned {
		k := key{p.Name, p.Where}
		o, made := found[k]
		delete(found, k)
		r.Attempts++
		r.count(p, o, made)
	}
	for k := range found {
		r.fail(Planned{Attempt{Name: k.name}, k.where}, "it is not in the plan")
	}
	slices.SortFunc(r.Failures, func(a, b Failure) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Where, b.Where)) })
	slices.SortFunc(r.Expected, func(a, b Expected) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Where, b.Where)) })
	return r
}

func (r *Report) count(p Planned, o Outcome, made bool) {
	switch {
	case !made:
		r.fail(p, "it was not made")
	case o.Broken != "":
		r.fail(p, "it could not be made: "+o.Broken)
	case o.Evidence != "" && p.Expected != "":
		r.Succeeded++
		r.Expected = append(r.Expected, Expected{p.Name, p.Where, p.Expected, o.Evidence})
	case o.Evidence != "":
		r.Succeeded++
		r.fail(p, "it succeeded: "+o.Evidence)
	case p.Expected != "":
		r.Refused++
		r.fail(p, "it is expected to succeed ("+p.Expected+") and was refused: "+o.Refused+"; if it is closed, take it off the list")
	default:
		r.Refused++
	}
}

func (r *Report) fail(p Planned, what string) {
	r.Failures = append(r.Failures, Failure{p.Name, p.Where, what, p.Does, p.Success})
}
