package cmd

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"

	"google.golang.org/grpc"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/console"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
)

// The orders of top.
const (
	sortCPU    = "cpu"
	sortMemory = "memory"
	sortName   = "name"
)

func sorts() []string { return []string{sortCPU, sortMemory, sortName} }

// all returns all messages of a stream.
func all[T any](stream grpc.ServerStreamingClient[T]) ([]*T, error) {
	var out []*T
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		}
		out = append(out, m)
	}
}

// rates computes how many processors sandboxes use, from one reading to the next.
type rates map[string]rate

// rate is that of one sandbox: its last reading, and the cores since the one before it; nil if there was none.
type rate struct {
	last  *usagev1.SandboxUsage
	cores *float64
}

// add takes the next readings, in their order, and forgets the sandboxes that are not among them. A counter that went backwards has no rate, and a reading
// that was received before has the one that it had then.
func (r rates) add(list []*usagev1.SandboxUsage) []render.Used {
	next := rates{}
	out := make([]render.Used, len(list))
	for i, u := range list {
		now := rate{last: u}
		if before, ok := r[u.GetUid()]; ok {
			now.cores = before.until(u)
		}
		next[u.GetUid()], out[i] = now, render.Used{SandboxUsage: u, Cores: now.cores}
	}
	clear(r)
	for uid, v := range next {
		r[uid] = v
	}
	return out
}

// until returns the cores from the last reading until another one.
func (r rate) until(u *usagev1.SandboxUsage) *float64 {
	took := u.GetReadTime().AsTime().Sub(r.last.GetReadTime().AsTime())
	used := u.GetCpu().GetTotal().AsDuration() - r.last.GetCpu().GetTotal().AsDuration()
	switch {
	case u.GetCpu().GetTotal() == nil, r.last.GetCpu().GetTotal() == nil, took < 0, used < 0:
		return nil
	case took == 0:
		return r.cores
	}
	n := used.Seconds() / took.Seconds()
	return &n
}

// order sorts sandboxes: those that use the most are the first, and those of which that is not known the last.
func order(list []render.Used, by string) {
	slices.SortFunc(list, func(a, b render.Used) int {
		n := 0
		switch by {
		case sortCPU:
			n = descending(a.Cores, b.Cores)
		case sortMemory:
			n = descending(a.GetMemory().WorkingSetBytes, b.GetMemory().WorkingSetBytes)
		}
		return cmp.Or(n, strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
}

func descending[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil || b == nil:
		return cmp.Compare(known(b), known(a))
	}
	return cmp.Compare(*b, *a)
}

func known[T any](v *T) int {
	if v == nil {
		return 0
	}
	return 1
}

// print prints sandboxes once.
func (t *top) print(list []*usagev1.SandboxUsage) error {
	used := t.rates.add(list)
	order(used, t.sort)
	c := t.cli
	sorted := make([]*usagev1.SandboxUsage, len(used))
	for i, u := range used {
		sorted[i] = u.SandboxUsage
	}
	if done, err := printList(c, "sandboxes", sorted); done {
		return err
	}
	if c.settings.Output == "name" {
		for _, u := range sorted {
			if err := c.printNames("sandbox", u.GetName()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(list) == 0 {
		c.infof("no running sandboxes found")
		return nil
	}
	return t.table(used).Flush(c.Out)
}

func (t *top) table(used []render.Used) *render.Table {
	columns := render.Columns{Namespace: t.selection.all, Wide: t.cli.settings.Output == "wide"}
	return render.Usage(columns, used, t.cli.Clock.Now())
}

// next prints sandboxes again, with notes for people below them.
func (t *top) next(list []*usagev1.SandboxUsage, notes ...string) error {
	if t.cli.machine() && t.cli.settings.Output != "name" {
		for _, u := range list {
			m := &usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Usage{Usage: u}}
			if _, err := t.cli.printNext(m); err != nil {
				return err
			}
		}
		for _, n := range notes {
			t.cli.infof("%s", n)
		}
		return nil
	}
	if t.cli.settings.Output == "name" {
		return t.print(list)
	}
	used := t.rates.add(list)
	order(used, t.sort)
	var b bytes.Buffer
	if err := t.table(used).Flush(&b); err != nil {
		return err
	}
	for _, n := range notes {
		b.WriteString(n + "\n")
	}
	return t.screen.show(b.String())
}

// screen shows one text after another: in place of it on a terminal, and below it, after an empty line, elsewhere.
type screen struct {
	out  io.Writer
	rows func() int // of the terminal; nil elsewhere
	used bool
}

func newScreen(out io.Writer) screen {
	s := screen{out: out}
	if console.Is(out) {
		s.rows = func() int { rows, _ := console.Size(out); return rows }
	}
	return s
}

// Sequences of a terminal: to the first row, and the removal of what is to the right of the cursor and below it.
const (
	home       = "\x1b[H"
	clearRight = "\x1b[K"
	clearBelow = "\x1b[J"
)

// show shows a text. Of one that is longer than the terminal it shows the beginning.
func (s *screen) show(text string) error {
	first := !s.used
	s.used = true
	if s.rows == nil {
		if !first {
			text = "\n" + text
		}
		_, err := io.WriteString(s.out, text)
		return err
	}
	lines := strings.SplitAfter(text, "\n")
	if rows := s.rows(); rows > 1 && len(lines) > rows {
		lines = lines[:rows-1]
	}
	body := strings.ReplaceAll(strings.Join(lines, ""), "\n", clearRight+"\n")
	_, err := io.WriteString(s.out, home+body+clearBelow)
	return err
}
