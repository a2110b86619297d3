package observe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// scanTimeout bounds a scan, lookTimeout a request about one container.
	scanTimeout = 50 * time.Second
	lookTimeout = 10 * time.Second
	// settle is the delay after a change before containerd is asked: changes come in groups of three.
	settle = 200 * time.Millisecond
)

// Scan lists the whole node and judges everything again. The error is about what could not be read; the rest is recorded.
func (s *NodeState) Scan(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, scanTimeout)
	defer cancel()
	started := s.clock.Now()
	// Remnants first: a container that is created meanwhile is in the list that follows. Remnants of containers that are known now
	// are left out: they are removed with their container, or found by the next survey.
	s.mu.Lock()
	known := s.inventory.ids()
	s.mu.Unlock()
	pieces, surveyErr := s.config.Node.Survey(ctx, known)
	if surveyErr != nil {
		surveyErr = fmt.Errorf("surveying remnants: %w", surveyErr)
	}
	asked := s.clock.Now()
	list, err := s.config.Node.List(ctx)
	if err != nil {
		s.config.Metrics.scanned(s.clock.Now().Sub(started), err)
		return errors.Join(fmt.Errorf("listing containers: %w", err), surveyErr)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replace(list, asked)
	if s.inventory.surveyed(pieces, surveyErr == nil, s.clock.Now()) {
		s.notify()
	}
	s.scanned = true
	s.judgeAll()
	s.agents.forget(s.clock.Now(), s.inventory.named)
	s.config.Metrics.scanned(s.clock.Now().Sub(started), surveyErr)
	s.count()
	return surveyErr
}

// refresh asks containerd about one container.
func (s *NodeState) refresh(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	asked := s.clock.Now()
	c, err := s.config.Node.Get(ctx, id)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case errdefs.IsNotFound(err) || (err == nil && !c.Managed):
		s.drop(id)
		return nil
	case err != nil:
		return err
	}
	if e := s.inventory.containers[id]; e != nil && e.seen.After(asked) {
		return nil
	}
	s.judge(s.put(c, asked), s.clock.Now())
	return nil
}
