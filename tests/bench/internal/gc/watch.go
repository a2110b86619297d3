package gc

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

// usage is what was used until a moment.
type usage struct {
	cpu      float64
	requests map[string]float64
}

func (w *testbed) usage(ctx context.Context, p *collector) (u usage, err error) {
	used, err := p.Usage()
	if err != nil {
		return u, err
	}
	u.cpu = used.CPUSeconds
	u.requests, err = w.requests(ctx)
	return u, err
}

// watch deletes owners and watches their dependents go: to the end, or for the limit if there is one.
func (s *set) watch(ctx context.Context, p *collector, as string, objects int, limit time.Duration, drop func(context.Context) (int, error)) (*Cascade, error) {
	resource := s.meta.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace(s.namespace)
	now, err := resource.List(ctx, metav1.ListOptions{LabelSelector: role + "=" + as, Limit: 1})
	if err != nil {
		return nil, fmt.Errorf("listing dependents: %w", err)
	}
	events, err := resource.Watch(ctx, metav1.ListOptions{LabelSelector: role + "=" + as, ResourceVersion: now.ResourceVersion})
	if err != nil {
		return nil, fmt.Errorf("watching dependents: %w", err)
	}
	defer events.Stop()
	before, err := s.usage(ctx, p)
	if err != nil {
		return nil, err
	}
	c := &Cascade{Objects: objects, Began: time.Now()}
	dropping, stop := context.WithCancel(ctx)
	defer stop()
	own := 0
	dropped := make(chan error, 1)
	go func() {
		var err error
		own, err = drop(dropping)
		dropped <- err
	}()
	err = c.follow(ctx, events.ResultChan(), p, limit)
	stop() // all owners have been deleted long since, unless something is wrong
	if err = errors.Join(err, <-dropped); err != nil {
		return nil, err
	}
	if len(c.Deleted) == objects {
		if err := wait.For(ctx, tailTime); err != nil {
			return nil, err
		}
	}
	after, err := s.usage(ctx, p)
	if err != nil {
		return nil, err
	}
	c.CPU = after.cpu - before.cpu
	for verb, n := range after.requests {
		c.Requests += n - before.requests[verb]
	}
	c.Requests -= float64(own)
	return c, nil
}

// follow notes when each dependent goes.
func (c *Cascade) follow(ctx context.Context, events <-chan watch.Event, p *collector, limit time.Duration) error {
	var over <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		over = timer.C
	}
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for len(c.Deleted) < c.Objects {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-look.C:
			if err := p.Alive(); err != nil {
				return err
			}
		case <-over:
			c.Watched = time.Since(c.Began)
			return nil
		case e, ok := <-events:
			switch {
			case !ok || e.Type == watch.Error:
				return fmt.Errorf("watching dependents: the watch has ended with %d of %d deleted", len(c.Deleted), c.Objects)
			case e.Type == watch.Deleted:
				c.Deleted = append(c.Deleted, time.Since(c.Began))
			}
		}
	}
	c.Watched = c.Deleted[len(c.Deleted)-1]
	return nil
}
