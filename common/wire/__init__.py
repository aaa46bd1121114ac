"""The only door to the stubs and to the options of grpc: conversion, statuses, servers, channels."""
